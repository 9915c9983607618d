"""kill -9 at random moments, again and again: not a word is ever lost, and no KV is ever wrong.

The real command answers turns from its standard input and is killed while it loads, reads, answers
or writes KV behind: at a moment by the clock, or at an operation on a file or a table, half of a
write done. What its output had promised by then must be in the session's file, every token of every
answer in it must be the model's own, and the next kvchat must be able to go on from there.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.conversation import Conversation
from kvchat.chat.store import SessionStore
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.fork_server import ForkedShell
from support.outside import Outside
from support.pack_chains import used_bytes
from support.soak_sizes import short_and_long
from support.stateful_models import STATEFUL
from support.victim import (
    Moment,
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
# A life of a few turns does up to a thousand operations on files and tables.
_LOG_OPERATIONS = 10.0


def at_an_operation(rng: random.Random) -> Moment:
    """Return a moment that is as likely among operations 1 to 32 as 32 to 1,024."""
    return Moment(operation=int(2 ** rng.uniform(0.0, _LOG_OPERATIONS)))


def moments(rng: random.Random, count: int) -> Iterator[Moment]:
    """Yield when each process is killed: most within an answer, or after it; the others while they
    load, or at an operation.
    """
    for number in range(count):
        if number % 4 < 2:
            yield Moment(rng.randint(1, 120), rng.uniform(0.0, 0.2))
        elif number % 4 == 2:
            yield Moment(0, rng.uniform(0.0, 2.0))
        else:
            yield at_an_operation(rng)


def note(totals: Counter[str], run: Run) -> None:
    """Count a life's end."""
    if run.was_killed:
        totals[f"kills: {run.phase}"] += 1
    else:
        totals["lives that ended before they were killed"] += 1


@short_and_long((1, 1), (10, 30))
def test_no_kill_loses_a_word(shell, model, reference, totals, size):
    num_chats, num_lives = size
    for number in range(num_chats):
        home = shell.home / str(number)
        home.mkdir()
        rng = random.Random(1000 * num_chats + number)
        chat = kill_one_chat(replace(shell, home=home), model, moments(rng, num_lives), totals)
        totals["tokens of answers held against the model"] += assert_every_token_is_the_models(
            reference, chat
        )


@short_and_long(2, 30)
def test_no_kill_loses_a_word_of_a_hybrid_over_few_bits(shell, tmp_path, totals, size):
    """Its snapshots are written beside KV in a code."""
    kind, settings = STATEFUL["lfm2"]
    hybrid = never_stopping(tiny_model(kind, max_position_embeddings=CONTEXT, **settings))
    model, when = save_checkpoint(tmp_path / "hybrid", hybrid), moments(random.Random(7), size)

    kill_one_chat(shell, model, when, totals, "--kv-dtype", "int8")


def kill_one_chat(
    shell: ForkedShell, model: Path, when: Iterator[Moment], totals: Counter[str], *flags: str
) -> Conversation:
    """Have processes go on with one conversation, each until its moment, and one to its end. Each
    has `flags`.
    """
    store = SessionStore(shell.home / ".local/share/kvchat/sessions")
    outside = Outside(shell.home)
    runs: list[Run] = []
    session: str | None = None
    for number, moment in enumerate(when):
        lines = [f"{number}.{turn}" for turn in range(NUM_LINES)]
        runs.append(Victim(shell, model, session, lines, *flags, moment=moment).die())
        note(totals, runs[-1])
        outside.assert_untouched()
        session = session or runs[-1].session
        assert runs[-1].session in (session, None)
        if session is not None:
            assert_nothing_was_lost(store.read(session).conversation, runs)

    runs.append(Victim(shell, model, session, ["and on", "and on and on"], *flags).finish())

    assert [has_ended for _, has_ended in runs[-1].answers] == [True, True]
    outside.assert_untouched()
    conversation = store.read(store.latest(takes_one_shots=True)).conversation
    assert_nothing_was_lost(conversation, runs)
    assert user_texts(conversation)[-2:] == ["and on", "and on and on"]
    assert len(conversation.context_ids()) < CONTEXT - 200, "the context was full before the end"
    return conversation


@dataclass
class Chat:
    """A conversation that processes take turns to go on with, until its context is nearly full."""

    number: int
    session: str | None = None
    runs: list[Run] = field(default_factory=list)


@dataclass
class Tally:
    """What was seen. A wrong answer, a lost word, a crash or damage fails the test at once."""

    num_restored: int = 0
    num_sound: int = 0
    most_bytes: int = 0


class Load:
    """Two chats at a time on one store, which is too small for all that they keep.

    Some are asked once and left; now and then the store is tidied or emptied.
    """

    def __init__(
        self,
        shell: ForkedShell,
        model: Path,
        reference: PreTrainedModel,
        totals: Counter[str],
        seed: int,
    ) -> None:
        self.tally = Tally()
        self._totals = totals
        self._outside = Outside(shell.home)
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
            self._note(chat, victim.die())
            note(self._totals, chat.runs[-1])
        if self._rng.random() < 0.1:
            self._tidy()
        self._chats = [self._next(chat) for chat in self._chats]

    def _victim(self, chat: Chat) -> Victim:
        chosen = self._rng.random()
        flags = [*_LIMITED]
        flags += ["--max-tokens", "40"] if chosen < 0.8 else []
        flags += ["--block-size", "8"] if chosen < 0.1 else []
        lines, moment = self._lines(chat), self._moment()
        return Victim(self._shell, self._model, chat.session, lines, *flags, moment=moment)

    def _moment(self) -> Moment:
        if self._rng.random() < 0.4:
            return at_an_operation(self._rng)
        num_events = self._rng.choice([0, 1, 43, 43, 86, 86, 129])
        return Moment(num_events, self._rng.uniform(0.0, 0.3 if num_events else 1.0))

    def _lines(self, chat: Chat) -> list[str]:
        """Return messages that were never sent before, short ones and longer ones."""
        place = f"{chat.number}.{len(chat.runs)}"
        sizes = (self._rng.choice([0, 0, 20, 200]) for _ in range(3))
        return [f"{place}.{turn}{' and on' * (n // 7)}" for turn, n in enumerate(sizes)]

    def _note(self, chat: Chat, run: Run) -> None:
        chat.runs.append(run)
        chat.session = chat.session or run.session
        self.tally.num_restored += run.num_restored > 0
        self.tally.most_bytes = max(self.tally.most_bytes, used_bytes(self.directory))
        assert self.tally.most_bytes <= LIMIT_MIB << 20
        self._outside.assert_untouched()
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
            num_tokens = assert_every_token_is_the_models(self._reference, conversation)
            self._totals["tokens of answers held against the model"] += num_tokens

    def _tidy(self) -> None:
        kept = StoreAdmin(self.directory)
        deed = self._rng.choice([kept.gc, self._verify, self._verify, kept.clear])
        deed()

    def _verify(self) -> int:
        """Read every pack; none may be damaged."""
        found = StoreAdmin(self.directory).verify()
        assert (found.num_damaged, found.num_tables) == (0, 0)
        return found.num_sound

    def finish(self) -> None:
        """No chat was damaged; each is gone on with to the end of two more turns."""
        self.tally.num_sound = self._verify()
        for chat in self._chats:
            lines = ["so", "and so on"]
            victim = Victim(self._shell, self._model, chat.session, lines, *_LIMITED)
            run = victim.finish()
            assert [has_ended for _, has_ended in run.answers] == [True, True]
            self._note(chat, run)
            self._check(chat)


@short_and_long(1, 330)
def test_no_kill_spoils_an_answer_or_the_kv_that_is_kept(shell, model, reference, totals, size):
    """Each pair of processes works on the store that the pair before it was killed over."""
    load = Load(shell.patient, model, reference, totals, seed=size)
    for _ in range(size):
        load.kill_two()
    load.finish()

    assert load.tally.num_sound > 0
    assert load.tally.num_restored > 0
    print(f"\n{load.tally}; wrong answers, crashes, lost words, damaged packs: 0")  # noqa: T201
