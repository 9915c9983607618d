"""kill -9 at random moments, again and again: not a word is ever lost, and no KV is ever wrong.

The real command answers turns from its standard input and is killed while it loads, reads, answers
or writes KV behind. What its output had promised by then must be in the session's file, every token
of every answer in it must be the model's own, and the next kvchat must be able to go on from there.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from kvchat.cache.caretaker import Caretaker
from kvchat.chat.store import SessionStore
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.commands import Shell
from support.pack_chains import used_bytes
from support.soak_sizes import short_and_long
from support.victim import (
    Run,
    Victim,
    assert_every_token_is_the_models,
    assert_nothing_was_lost,
    user_texts,
)

CONTEXT = 8192
NUM_LINES = 3
LIMIT_MIB = 24
_LIMITED = ("--disk-cache", f"{LIMIT_MIB}M")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """A model whose KV takes 4 KiB a token, so that packs are files."""
    sizes = {"num_key_value_heads": 4, "head_dim": 64}
    return never_stopping(tiny_model("llama", max_position_embeddings=CONTEXT, **sizes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, reference: PreTrainedModel) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), reference)


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
        if session is not None:
            assert_nothing_was_lost(store.read(session).conversation, runs)

    runs.append(Victim(shell, model, session, ["and on", "and on and on"]).finish())

    assert [has_ended for _, has_ended in runs[-1].answers] == [True, True]
    assert len(store.ids()) == 1
    conversation = store.read(store.latest()).conversation
    assert_nothing_was_lost(conversation, runs)
    assert user_texts(conversation)[-2:] == ["and on", "and on and on"]
    assert len(conversation.context_ids()) < CONTEXT - 200, "the context was full before the end"
    assert_every_token_is_the_models(reference, conversation)


@dataclass
class Chat:
    """A conversation that processes take turns to go on with, until its context is nearly full."""

    number: int
    session: str | None = None
    runs: list[Run] = field(default_factory=list)


@dataclass
class Tally:
    """What was seen. A wrong answer, a lost word, a crash or damage fails the test at once."""

    num_kills: int = 0
    num_restored: int = 0
    num_troubles: int = 0
    num_tokens: int = 0
    num_sound: int = 0
    most_bytes: int = 0


class Load:
    """Two chats at a time on one store, which is too small for all that they keep.

    Some are asked once and left; now and then somebody tidies the store, or empties it.
    """

    def __init__(self, shell: Shell, model: Path, reference: PreTrainedModel, seed: int) -> None:
        self.tally = Tally()
        self._shell, self._model, self._reference = shell, model, reference
        self._rng = random.Random(seed)
        self._store = SessionStore(shell.home / ".local/share/kvchat/sessions")
        self.directory = shell.home / ".cache/kvchat/kv"
        self._chats = [Chat(0), Chat(1)]
        self._num_chats = 2

    def kill_two(self) -> None:
        """Start two processes and kill each at a moment of its own."""
        victims = [(chat, self._victim(chat)) for chat in self._chats]
        self._rng.shuffle(victims)
        for chat, victim in victims:
            victim.watch(self._rng.choice([0, 1, 43, 43, 86, 86, 129]), self._rng.uniform(0, 0.3))
            self._note(chat, victim.kill())
            self.tally.num_kills += 1
        if self._rng.random() < 0.1:
            self._tidy()
        self._chats = [self._next(chat) for chat in self._chats]

    def _victim(self, chat: Chat) -> Victim:
        chosen = self._rng.random()
        flags = [*_LIMITED]
        flags += ["--max-tokens", "40"] if chosen < 0.8 else []
        flags += ["--block-size", "8"] if chosen < 0.1 else []
        return Victim(self._shell, self._model, chat.session, self._lines(chat), *flags)

    def _lines(self, chat: Chat) -> list[str]:
        """Return messages nobody has sent before, short ones and longer ones."""
        place = f"{chat.number}.{len(chat.runs)}"
        sizes = (self._rng.choice([0, 0, 20, 200]) for _ in range(3))
        return [f"{place}.{turn}{' and on' * (n // 7)}" for turn, n in enumerate(sizes)]

    def _note(self, chat: Chat, run: Run) -> None:
        chat.runs.append(run)
        chat.session = chat.session or run.session
        self.tally.num_restored += run.num_restored > 0
        self.tally.num_troubles += "disk cache" in run.complaint
        self.tally.most_bytes = max(self.tally.most_bytes, used_bytes(self.directory))
        if chat.session is not None:
            assert_nothing_was_lost(self._store.read(chat.session).conversation, chat.runs)

    def _next(self, chat: Chat) -> Chat:
        """Return the chat, or another where it is long enough or was asked once."""
        if len(chat.runs) < 12 and self._rng.random() < 0.9:
            return chat
        self._check(chat)
        self._num_chats += 1
        return Chat(self._num_chats)

    def _check(self, chat: Chat) -> None:
        if chat.session is not None:
            conversation = self._store.read(chat.session).conversation
            self.tally.num_tokens += assert_every_token_is_the_models(self._reference, conversation)

    def _tidy(self) -> None:
        kept = Caretaker(self.directory)
        deed = self._rng.choice([kept.gc, self._verify, self._verify, kept.clear])
        deed()

    def _verify(self) -> int:
        """Read every pack; none may be damaged."""
        found = Caretaker(self.directory).verify()
        assert (found.num_damaged, found.num_tables) == (0, 0)
        return found.num_sound

    def finish(self) -> None:
        """Nobody was damaged; each chat is gone on with to the end of two more turns."""
        self.tally.num_sound = self._verify()
        for chat in self._chats:
            lines = ["so", "and so on"]
            victim = Victim(self._shell, self._model, chat.session, lines, *_LIMITED)
            run = victim.finish()
            assert [has_ended for _, has_ended in run.answers] == [True, True]
            self._note(chat, run)
            self._check(chat)


@short_and_long(1, 100)
def test_no_kill_spoils_an_answer_or_the_kv_that_is_kept(
    shell: Shell, model: Path, reference: PreTrainedModel, size: int
) -> None:
    """Each pair of processes works on the store that the pair before it was killed over."""
    load = Load(shell.patient, model, reference, seed=size)
    for _ in range(size):
        load.kill_two()
    load.finish()

    assert load.tally.num_kills == 2 * size
    assert load.tally.num_sound > 0
    assert load.tally.num_restored > 0
    assert load.tally.most_bytes <= LIMIT_MIB << 20
    print(f"\n{load.tally}; wrong answers, crashes, lost words, damaged packs: 0")  # noqa: T201
