"""kill -9 of what tidies, forgets, heals and makes stores: at operations on files and tables.

`cache clear`, `gc` and `verify`, `sessions rm`, `/forget`, a first turn in an empty store and one
over a damaged store are killed at random operations, each over what the one before it has left. No
conversation but the one that was to go may lose a word, and KV that was damaged must never be
believed.
"""

import random
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.store import SessionStore
from support.fork_server import ForkedShell
from support.outside import Outside
from support.pack_chains import payload_files, used_bytes
from support.soak_sizes import short_and_long
from support.victim import Moment, Victim, assert_every_token_is_the_models, user_texts

LIMIT_MIB = 24
_LIMITED = ("--disk-cache", f"{LIMIT_MIB}M", "--max-tokens", "40")
# A command that loads no model does up to 120 operations; one turn does up to a thousand.
_LOG_COMMAND, _LOG_TURN = 6.5, 10.0
WAIT_S = 240.0


class Desk:
    """A home whose conversations are grown by whole turns, and what is killed there."""

    def __init__(self, shell: ForkedShell, model: Path, seed: int, totals: Counter[str]) -> None:
        self._shell, self._model, self._totals = shell, model, totals
        self._rng = random.Random(seed)
        self._outside = Outside(shell.home)
        self.store = SessionStore(shell.home / ".local/share/kvchat/sessions")
        self.directory = shell.home / ".cache/kvchat/kv"
        self._num_lines = 0
        self.num_kills = 0
        # What each conversation holds: the user's messages, oldest first.
        self.texts: dict[str, list[str]] = {}

    def act(self) -> None:
        """Do one thing that is killed; then see that all is as it should be."""
        while len(self.texts) < 2:
            self.grow(None)
        deeds = [self._tidy, self._tidy, self._remove, self._forget, self._create, self._heal]
        self._rng.choice(deeds)()
        self._assert_all_is_well()
        if self._rng.random() < 0.15:
            self.grow(self._rng.choice([None, *self.texts]))

    def grow(self, session: str | None) -> None:
        """Have a conversation gone on with to the end of a turn; nothing is killed."""
        line = self._line()
        run = Victim(self._shell, self._model, session, [line], *_LIMITED).finish()
        assert run.session is not None
        self.texts.setdefault(run.session, []).append(line)

    def _line(self) -> str:
        self._num_lines += 1
        return f"line {self._num_lines}{' and on' * self._rng.choice([0, 5, 40])}"

    def _moment(self, log_operations: float) -> Moment:
        return Moment(operation=int(2 ** self._rng.uniform(0.0, log_operations)))

    def _tidy(self) -> None:
        what = self._rng.choice(["clear", "gc", "verify"])
        self._kill("cache " + what, "cache", what, *(["--yes"] if what == "clear" else []))

    def _remove(self) -> None:
        session = self._rng.choice(list(self.texts))
        self._kill("sessions rm", "sessions", "rm", session)
        if session not in self.store.ids():
            del self.texts[session]

    def _kill(self, name: str, *arguments: str) -> None:
        life = self._shell.start(*arguments, kill_at=self._moment(_LOG_COMMAND).operation)
        life.stdin.close()
        life.stdout.read()
        complaint = life.stderr.read().decode()
        assert life.wait(WAIT_S) in (0, -signal.SIGKILL), complaint
        assert "Traceback" not in complaint, complaint
        self._note(name, life.returncode != 0)

    def _forget(self) -> None:
        """All of a conversation or its last turn: it is whole afterwards, or without that."""
        session = self._rng.choice(list(self.texts))
        line = self._rng.choice(["/forget yes", "/forget last yes"])
        flags, moment = _LIMITED, self._moment(_LOG_TURN)
        run = Victim(self._shell, self._model, session, [line], *flags, moment=moment).die()
        self._note("/forget", run.was_killed)
        before = self.texts.pop(session)
        if session in self.store.ids():
            left = user_texts(self.store.read(session).conversation)
            assert left in (before, before[:-1], [])
            if left:
                self.texts[session] = left
            else:
                self.store.remove(session)

    def _create(self) -> None:
        """A first turn, of a store that is not there."""
        StoreAdmin(self.directory).clear()
        self._turn("making a store", None)

    def _heal(self) -> None:
        """A turn that meets a damaged pack or table."""
        damaged = [*payload_files(self.directory), *self.directory.glob("*/cache.db")]
        if damaged:
            path = self._rng.choice(damaged)
            data = bytearray(path.read_bytes())
            place = self._rng.randrange(max(1, len(data) - 64))
            data[place : place + 64] = self._rng.randbytes(len(data[place : place + 64]))
            with path.open("r+b") as file:
                file.write(data)
        self._turn("healing", self._rng.choice(list(self.texts)))

    def _turn(self, name: str, session: str | None) -> None:
        line, moment = self._line(), self._moment(_LOG_TURN)
        known = set(self.store.ids())
        run = Victim(self._shell, self._model, session, [line], *_LIMITED, moment=moment).die()
        self._note(name, run.was_killed)
        for found in {*(set(self.store.ids()) - known), *([session] if session else [])}:
            path = self.store.directory / f"{found}.jsonl"
            if b"\n" not in path.read_bytes():  # its first line is torn: nothing was promised yet
                assert not run.begun
                path.unlink()
                continue
            texts = user_texts(self.store.read(found).conversation)
            before = self.texts.get(found, [])
            assert texts in (before, [*before, line])
            assert not run.begun or texts[-1] == line
            self.texts[found] = texts

    def _note(self, name: str, was_killed: bool) -> None:
        self.num_kills += was_killed
        end = f"kills: {name}" if was_killed else "lives that ended before they were killed"
        self._totals[end] += 1

    def _assert_all_is_well(self) -> None:
        self._outside.assert_untouched()
        assert used_bytes(self.directory) <= LIMIT_MIB << 20
        for session, texts in self.texts.items():
            conversation = self.store.read(session).conversation
            conversation.check()
            assert user_texts(conversation) == texts


@short_and_long(2, 450)
def test_no_kill_of_what_tidies_or_heals_loses_a_word(shell, model, reference, totals, size):
    desk = Desk(replace(shell.patient, server=shell.server), model, size, totals)
    for _ in range(size):
        desk.act()
    for session in list(desk.texts)[-20:]:
        desk.grow(session)
        chat = desk.store.read(session).conversation
        totals["tokens of answers held against the model"] += assert_every_token_is_the_models(
            reference, chat
        )

    assert desk.num_kills >= size // 3
