"""kill -9 at random moments, again and again on one session: not a word is ever lost.

The real command answers turns from its standard input and is killed while it loads, reads or
answers. What its output had promised by then must be in the session's file, every token of every
answer in it must be the model's own, and the next kvchat must be able to go on from there.
"""

import json
import queue
import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvchat.cache.caretaker import Caretaker
from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.store import SessionStore
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.commands import Shell
from support.soak_sizes import short_and_long

WAIT_S = 120.0
CONTEXT = 8192
NUM_LINES = 3
TIE = 1e-3  # greedy choices may differ where two logits are equal within rounding


@dataclass
class Run:
    """What one process was sent, and what its output said before its end."""

    sent: list[str]
    events: list[dict[str, Any]] = field(default_factory=list)

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
        self, shell: Shell, model: Path, session: str | None, lines: list[str], *flags: str
    ) -> None:
        resume = ["-r", session] if session is not None else []
        self._process = shell.start(
            *("--model", str(model), "--input-format", "lines", "--output-format", "stream-json"),
            *("--temperature", "0", "--max-tokens", "150", "--quiet", *resume, *flags),
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.run = Run(lines)
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def watch(self, num_events: int, seconds: float) -> None:
        """Read so many events, then those of so many seconds more."""
        for _ in range(num_events):
            if not self._take(WAIT_S):
                return
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0 and self._take(left_s):
            pass

    def _take(self, timeout_s: float) -> bool:
        """Take one event; false at the end of the output, or of the time."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if line.endswith(b"\n"):  # or it was torn: nobody has read it
            self.run.events.append(json.loads(line))
        if not line:
            self._lines.put(line)  # the end stays the end, however often it is asked for
        return bool(line)

    def kill(self) -> Run:
        self._process.kill()
        self._process.wait(WAIT_S)
        while self._take(WAIT_S):
            pass
        return self._close()

    def finish(self) -> Run:
        while self._take(WAIT_S):
            pass
        assert self._process.wait(WAIT_S) == 0
        return self._close()

    def _close(self) -> Run:
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        return self.run


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return never_stopping(tiny_model("llama", max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, reference: PreTrainedModel) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), reference)


def user_texts(conversation: Conversation) -> list[str]:
    return [turn.text for turn in conversation.turns() if turn.role is Role.USER]


def assert_nothing_was_lost(store: SessionStore, runs: list[Run]) -> None:
    """Hold the file against what all runs so far were sent and said."""
    conversation = store.read(store.latest()).conversation
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


def assert_every_token_is_the_models(reference: PreTrainedModel, chat: Conversation) -> None:
    """Hold every answer, partial ones too, against one forward pass over the whole context."""
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([chat.context_ids()]), use_cache=False).logits[0]
    position = 0
    for turn in chat.path():
        for token in turn.token_ids:
            row = logits[position - 1]
            is_drawn = turn.role is Role.ASSISTANT
            assert not is_drawn or row.max() - row[token] < TIE, f"position {position}"
            position += 1


def moments(rng: random.Random, count: int) -> Iterator[tuple[int, float]]:
    """Yield after how many events, and how many seconds more, each process is killed."""
    for number in range(count):
        in_answer = (rng.randint(1, 120), rng.uniform(0.0, 0.2))
        yield in_answer if number % 4 < 3 else (0, rng.uniform(0.0, 4.0))


@short_and_long(1, 30)
def test_no_kill_loses_a_word(
    shell: Shell, model: Path, reference: PreTrainedModel, size: int
) -> None:
    store = SessionStore(shell.home / ".local/share/kvchat/sessions")
    runs: list[Run] = []
    session: str | None = None
    for number, (num_events, seconds) in enumerate(moments(random.Random(size), size)):
        lines = [f"{number}.{turn}" for turn in range(NUM_LINES)]
        victim = Victim(shell, model, session, lines)
        victim.watch(num_events, seconds)
        runs.append(victim.kill())
        session = session or runs[0].session
        assert runs[-1].session in (session, None)
        assert_nothing_was_lost(store, runs)

    runs.append(Victim(shell, model, session, ["and on", "and on and on"]).finish())

    assert [has_ended for _, has_ended in runs[-1].answers] == [True, True]
    assert_nothing_was_lost(store, runs)
    assert len(store.ids()) == 1
    conversation = store.read(store.latest()).conversation
    assert user_texts(conversation)[-2:] == ["and on", "and on and on"]
    assert len(conversation.context_ids()) < CONTEXT - 200, "the context was full before the end"
    assert_every_token_is_the_models(reference, conversation)


@short_and_long(2, 200)
def test_no_kill_spoils_the_kv_that_is_kept(
    shell: Shell, model: Path, reference: PreTrainedModel, size: int
) -> None:
    """Most are killed while what they computed is being written behind, each on the last one's
    store; a session of many turns is left for a new one before its context is full.
    """
    rng, store = random.Random(size), SessionStore(shell.home / ".local/share/kvchat/sessions")
    kept = Caretaker(shell.home / ".cache/kvchat/kv")
    session: str | None = None
    num_restored = 0
    for number in range(size):
        session = None if number % 20 == 0 else session
        flags = ("--max-tokens", "40") if rng.random() < 0.8 else ()
        victim = Victim(shell, model, session, [f"{number}.{turn}" for turn in range(3)], *flags)
        victim.watch(rng.choice([0, 1, 43, 43, 86, 86, 129]), rng.uniform(0.0, 0.3))
        run = victim.kill()
        session = session or run.session
        num_restored += run.num_restored > 0
    verified = kept.verify()
    assert (verified.num_damaged, verified.num_tables) == (0, 0)
    assert verified.num_sound > 0

    copy = shutil.copytree(shell.home, shell.home.parent / f"{shell.home.name}-cold")
    session, lines = store.latest(), ["and on", "and on and on"]
    warm = Victim(shell, model, session, lines).finish()
    assert warm.num_restored > 0
    assert [has_ended for _, has_ended in warm.answers] == [True, True]
    assert_every_token_is_the_models(reference, store.read(session).conversation)
    if size > 2:  # what a cold process answers has just been computed without any process
        cold = Victim(Shell(copy), model, session, lines, "--no-cache").finish()
        assert cold.num_restored == 0
        assert warm.answers == cold.answers
    print(f"\n{size} kills, {num_restored} runs restored, {verified}")  # noqa: T201
