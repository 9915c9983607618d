"""Scoring: a perfect talker scores full marks, a silent one none; the history is its own."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import one_hot

from demo_recipe.evaluate import Report, evaluate, shortfalls
from demo_recipe.grammar import Grade
from demo_recipe.probes import MAKERS, Probe, handwritten, probes
from demo_recipe.scene import Turn
from demo_recipe.scores import Verdict, judge, run_probes
from demo_recipe.speculation import Acceptance, replay
from demo_recipe.talkers import Message, Reply

QUICK_TESTS = [test for test in MAKERS if "3,000" not in test]


@pytest.mark.parametrize(
    ("reply", "missing", "forbidden"),
    [
        ("Use /redo for the last TURN.", (), ()),
        ("Use /redo.", ("turn",), ()),
        ("/undo takes a turn back in Rome.", (), ("rome",)),
        ("That is 131 turns.", ("/undo|/redo",), ()),
        ("", ("/undo|/redo", "turn"), ()),
    ],
)
def test_a_reply_needs_one_pattern_of_each_group_and_no_forbidden_one(
    reply: str, missing: tuple[str, ...], forbidden: tuple[str, ...]
) -> None:
    turn = Turn("", "", "", all=(("/undo", "/redo"), ("turn",)), none=("rome", r"\b13\b"))

    assert judge(reply, turn) == Verdict(missing, forbidden)


class Echo:
    """A draft that knows a text and guesses its next token, but for some positions."""

    device = torch.device("cpu")

    def __init__(self, wrong: set[int]) -> None:
        self._wrong = wrong

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        guesses = [
            0 if place in self._wrong else token for place, token in enumerate(ids[0].tolist())
        ]
        return SimpleNamespace(logits=one_hot(torch.tensor([[*guesses[1:], 0]]), 100))


def test_a_round_accepts_drafts_up_to_the_first_wrong_one() -> None:
    prompt, reply = [4, 8], list(range(50, 65))

    assert replay(Echo(set()), [prompt], [reply]) == Acceptance(num_rounds=3, num_accepted=12)
    # The first round accepts one token, and the target gives the next, which was wrong.
    assert replay(Echo({3}), [prompt], [reply]) == Acceptance(num_rounds=4, num_accepted=12)


class Parrot:
    """Replies what the script says, or nothing at all; remembers the histories it was given."""

    def __init__(self, scripted: Sequence[Probe], *, is_silent: bool = False) -> None:
        self._replies = {
            (len(probe.turns[: number + 1]), turn.user): turn.reply
            for probe in scripted
            for number, turn in enumerate(probe.turns)
        }
        self._is_silent = is_silent
        self.histories: list[list[Message]] = []

    def reply(self, histories: Sequence[list[Message]]) -> list[Reply]:
        self.histories += [list(history) for history in histories]
        return [self._reply(history) for history in histories]

    def _reply(self, history: list[Message]) -> Reply:
        number = sum(message["role"] == "user" for message in history)
        text = "" if self._is_silent else self._replies[number, history[-1]["content"]]
        return Reply(text, [], not self._is_silent)


@pytest.mark.parametrize("grade", [Grade.KNOWN, Grade.UNSEEN], ids=lambda grade: grade.value)
@pytest.mark.parametrize("test", QUICK_TESTS)
def test_the_scripted_replies_score_full_marks(test: str, grade: Grade) -> None:
    for probe in probes(test, grade, 8, seed=1):
        tally = run_probes(Parrot([probe]), [probe])

        assert tally.rate == 1.0
        assert tally.num_finished == tally.num_replies


def test_the_talkers_own_replies_stand_in_the_history() -> None:
    scripted = list(probes("recall after 6 turns", Grade.KNOWN, 1, seed=1))
    silent = Parrot(scripted, is_silent=True)

    run_probes(silent, scripted)

    last = silent.histories[-1]
    assert len(last) == 2 * len(scripted[0].turns) - 1
    assert {message["content"] for message in last if message["role"] == "assistant"} == {""}


def test_recall_is_asked_as_many_turns_later_as_the_test_says() -> None:
    for gap in (1, 6, 30):
        name = f"recall after {gap} turn{'s' if gap > 1 else ''}"
        for probe in probes(name, Grade.KNOWN, 3, seed=1):
            assert len(probe.turns) == gap + 1


def test_there_are_fifty_hand_written_prompts_and_nonsense_passes_none() -> None:
    prompts = list(handwritten())

    assert len(prompts) == 50
    assert not any(judge("zzz", probe.last).is_good for probe in prompts)


def test_a_report_names_what_misses_its_goal() -> None:
    lengths = {"known": {"mean acceptance length": 2.5}, "unseen": {"mean acceptance length": 3.5}}
    silent = Report(evaluate(Parrot([], is_silent=True), 1, ("kvchat",)).scores, lengths)

    assert [what for what, _, _ in shortfalls(silent.as_json())] == [
        "kvchat, known",
        "kvchat, unseen",
        "list after 5 operations, known",  # given up, and never left out
        "list after 5 operations, unseen",
        "handwritten",
        "ends by itself",
        "acceptance length, known",
    ]
