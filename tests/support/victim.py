"""A real kvchat that answers lines and is killed, and what must be true of its sessions then."""

import json
import queue
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvchat.chat.conversation import Conversation, Role
from support.fork_server import ForkedShell

WAIT_S = 240.0
TIE = 1e-3  # greedy choices may differ where two logits are equal within rounding
_ALL = 1 << 30
# By the last event that was seen: what a process was doing.
_PHASES = {None: "loading", "start": "prefill", "prefill": "decode", "delta": "decode"}


@dataclass(frozen=True)
class Moment:
    """When a process is killed: so many seconds after so many events, or at an operation on a file
    or a table, which only a forked one can count.
    """

    num_events: int = _ALL
    seconds: float = 0.0
    operation: int | None = None


NEVER = Moment()


@dataclass
class Run:
    """What one process was sent, and what its output said before its end."""

    sent: list[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    complaint: str = ""
    was_killed: bool = False

    @property
    def phase(self) -> str:
        """What it was doing at its end, as far as its output says."""
        last = self.events[-1]["event"] if self.events else None
        return _PHASES.get(last, "write-behind")

    @property
    def session(self) -> str | None:
        return next((event["session"] for event in self.events), None)

    @property
    def begun(self) -> list[str]:
        """The lines whose answer had begun."""
        return self.sent[: sum(event["event"] == "start" for event in self.events)]

    @property
    def num_restored(self) -> int:
        """Tokens of the first prompt whose KV came from the disk."""
        read = (event["cached_tokens"] for event in self.events if event["event"] == "prefill")
        return next(read, {}).get("disk", 0)

    @property
    def answers(self) -> list[tuple[str, bool]]:
        """The text seen of each answer, and whether its end was."""
        answers: list[tuple[str, bool]] = []
        for event in self.events:
            if event["event"] == "start":
                answers.append(("", False))
            elif event["event"] == "delta":
                answers[-1] = (answers[-1][0] + event.get("text", ""), False)
            elif event["event"] == "end":
                answers[-1] = (answers[-1][0], True)
        return answers


class Victim:
    """A kvchat that answers lines, and is killed."""

    def __init__(
        self,
        shell: ForkedShell,
        model: Path,
        session: str | None,
        lines: list[str],
        *flags: str,
        moment: Moment = NEVER,
    ) -> None:
        resume = ["-r", session] if session is not None else []
        self._moment = moment
        self._process = shell.start(
            *("--model", str(model), "--input-format", "lines", "--output-format", "stream-json"),
            *("--temperature", "0", "--max-tokens", "150", *resume, *flags),
            kill_at=moment.operation,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.run = Run(lines)
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # it may be dead by now
            stdin.write("".join(f"{line}\n" for line in lines).encode())

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def die(self) -> Run:
        """Read until its moment has come, and kill it."""
        self.watch()
        return self.kill()

    def watch(self) -> None:
        """Read until its moment has come."""
        for _ in range(self._moment.num_events):
            if not self._take(WAIT_S):
                return
        end_s = time.monotonic() + self._moment.seconds
        while (left_s := end_s - time.monotonic()) > 0 and self._take(left_s):
            pass

    def _take(self, timeout_s: float) -> bool:
        """Take one event; false at the end of the output, or of the time."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if line.endswith(b"\n"):  # or it was torn: it was not read
            self.run.events.append(json.loads(line))
        if not line:
            self._lines.put(line)  # the end stays the end, however often it is asked for
        return bool(line)

    def kill(self) -> Run:
        self._process.kill()
        self._process.wait(WAIT_S)
        while self._take(WAIT_S):
            pass
        assert self._process.returncode in (0, -signal.SIGKILL), self.complaint()
        self.run.was_killed = self._process.returncode != 0
        return self._close()

    def complaint(self) -> str:
        """Return what was written to its standard error, once it has ended."""
        return self._process.stderr.read().decode(errors="replace")

    def finish(self, exit_codes: Sequence[int] = (0,)) -> Run:
        """Read to the end of the process, which ends with one of these codes."""
        while self._take(WAIT_S):
            pass
        assert self._process.wait(WAIT_S) in exit_codes, self.complaint()
        return self._close()

    def _close(self) -> Run:
        self.run.complaint = self.complaint()
        assert "Traceback" not in self.run.complaint, self.run.complaint
        for pipe in (self._process.stdout, self._process.stderr):
            pipe.close()
        return self.run


def user_texts(conversation: Conversation) -> list[str]:
    return [turn.text for turn in conversation.turns() if turn.role is Role.USER]


def assert_nothing_was_lost(conversation: Conversation, runs: list[Run]) -> None:
    """Hold a conversation, as it was saved, against what all its runs were sent and said."""
    conversation.check()
    texts = iter(user_texts(conversation))
    for run in runs:
        for line in run.begun:
            assert line in texts, f"{line!r} had been answered and is not there"  # takes it out
    said = {
        conversation.turn(turn.parent_id).text: turn
        for turn in conversation.turns()
        if turn.role is Role.ASSISTANT
    }
    for run in runs:
        for line, (text, has_ended) in zip(run.begun, run.answers, strict=True):
            kept = said[line].text if line in said else ""
            assert kept.startswith(text) or text.startswith(kept), line
            if has_ended:
                assert kept == text
                assert said[line].finish is not None


def assert_every_token_is_the_models(reference: PreTrainedModel, chat: Conversation) -> int:
    """Hold every answer of every branch, partial ones too, against forward passes over whole
    contexts; return how many tokens that were.
    """
    return sum(_assert_branch(reference, chat, leaf.turn_id) for leaf in chat.leaves())


def _assert_branch(reference: PreTrainedModel, chat: Conversation, leaf: int) -> int:
    ids = torch.tensor([chat.context_ids(leaf)])
    with torch.inference_mode():
        logits = reference(input_ids=ids, use_cache=False).logits[0]
    position = num_drawn = 0
    for turn in chat.path(leaf):
        for token in turn.token_ids:
            row = logits[position - 1]
            is_drawn = turn.role is Role.ASSISTANT
            assert not is_drawn or row.max() - row[token] < TIE, f"position {position}"
            position, num_drawn = position + 1, num_drawn + is_drawn
    return num_drawn
