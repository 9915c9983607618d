"""Running probes through a talker and counting: the numbers of the model card.

Every chat runs freely: the model's own replies stand in its history. Knows probes and replies;
knows no network.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from demo_recipe.probes import Probe
from demo_recipe.scene import Turn
from demo_recipe.talkers import Message, Talker


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a reply; empty tuples for a good one."""

    missing: tuple[str, ...]
    forbidden: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return not self.missing and not self.forbidden


def judge(reply: str, turn: Turn) -> Verdict:
    """Judge a reply by the patterns of its turn, which match in any letter case."""

    def has(pattern: str) -> bool:
        return re.search(pattern, reply, re.IGNORECASE) is not None

    missing = ("|".join(group) for group in turn.all if not any(map(has, group)))
    return Verdict(tuple(missing), tuple(filter(has, turn.none)))


@dataclass(slots=True)
class Tally:
    """Counts of one test in one grade."""

    num_good: int = 0
    num_probes: int = 0
    num_replies: int = 0
    num_finished: int = 0

    @property
    def rate(self) -> float:
        return self.num_good / self.num_probes


def run_probes(talker: Talker, probes: Sequence[Probe]) -> Tally:
    """Play all probes turn by turn, all chats at once, and judge each last reply."""
    tally = Tally(num_probes=len(probes))
    histories: list[list[Message]] = [[] for _ in probes]
    for turn in range(max(len(probe.turns) for probe in probes)):
        live = []
        for number, probe in enumerate(probes):
            if turn >= len(probe.turns):
                continue
            histories[number].append({"role": "user", "content": probe.turns[turn].user})
            if turn in probe.scripted:
                scripted = probe.turns[turn].reply
                histories[number].append({"role": "assistant", "content": scripted})
            else:
                live.append(number)
        replies = talker.reply([histories[number] for number in live]) if live else []
        for number, reply in zip(live, replies, strict=True):
            histories[number].append({"role": "assistant", "content": reply.text})
            tally.num_replies += 1
            tally.num_finished += reply.is_finished
            if turn + 1 == len(probes[number].turns):
                tally.num_good += judge(reply.text, probes[number].last).is_good
    return tally
