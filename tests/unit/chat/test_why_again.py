"""What a process finds gone that was kept, or should have been: the user is told the cause.

A real engine and a real store; between two lives of the program something happens to what was kept.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.chat.why import Reuse, Times, cause, explain, reuse_of
from kvchat.core.text import Size
from support import tiny_host as hosts
from support.pack_chains import payload_files
from support.patient_kvchat import be_patient
from support.tiny_host import ask, tiny_host

TEXT = "Of the twelve ships in the harbour of Grimstad three are red and nine are blue. " * 2
# Beside what tables take there is room for some conversations, or for less than one.
FEW, NONE = Size(num_bytes=1 << 20), Size(num_bytes=(1 << 19) + (60 << 10))


@pytest.fixture
def resumed(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Resumed":
    be_patient(monkeypatch)
    return Resumed(checkpoint, tmp_path, monkeypatch)


class Resumed:
    """A conversation that one process holds and another goes on with."""

    def __init__(self, checkpoint: Path, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.kept = home / "kv"
        self.store = SessionStore(home / "sessions")
        self._checkpoint = checkpoint
        self._patch = patch

    def why(
        self,
        meanwhile: Callable[[Path], object] = lambda _: None,
        limit: Size = hosts.DISK,
        num_others: int = 0,
        num_before: int = 0,
    ) -> Reuse:
        """Return what the second process knows of its first answer.

        The first process has had others `num_before` it, and `num_others` after.
        """
        self._patch.setattr(hosts, "DISK", limit)
        host = tiny_host(self._checkpoint, self.store, kept=self.kept)
        for number in range(num_before):
            ask(host.new_session(), f"{number}. {TEXT}", 30)
        session = host.new_session()
        ask(session, TEXT, 30)
        for number in range(num_others):
            ask(host.new_session(), f"{number}. {TEXT}", 30)
        host.close()
        session.close()
        meanwhile(self.kept)
        host = tiny_host(self._checkpoint, self.store, kept=self.kept)
        again: ChatSession = host.open_session(session.session_id)
        ended = ask(again, "And how many are green?")
        host.close()
        times = Times(host.began_s, StoreAdmin(self.kept).cleared_s())
        return reuse_of(
            again.conversation, ended.turn_id, ended.usage.cached, ended.miss_reason, times
        )


def spoil(directory: Path) -> None:
    for path in payload_files(directory):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def told(reuse: Reuse) -> str:
    return "\n".join(explain(reuse, lambda ids: str(ids)))


def test_what_was_kept_costs_nothing(resumed: Resumed) -> None:
    assert cause(resumed.why()) == ""


@pytest.mark.parametrize(
    ("given", "few_words", "words"),
    [
        ({"limit": FEW, "num_others": 40}, "evicted", "evicted to make room, or out of date"),
        ({"limit": NONE}, "over budget", "--disk-cache allows more"),
        ({"meanwhile": spoil}, "corrupt", "what was kept on disk was corrupt, and is gone now"),
    ],
)
def test_what_is_not_there_any_more_has_its_cause(resumed, given, few_words, words):
    found = resumed.why(**given)

    assert cause(found) == few_words
    assert words in told(found)


def test_what_came_while_there_was_no_room_for_another(resumed: Resumed) -> None:
    """The chat that was refused told so; the one beside it, not even offered, did not."""
    found = resumed.why(limit=NONE, num_before=1)

    assert cause(found) == "over budget"


def test_what_was_deleted(resumed: Resumed) -> None:
    cleared = resumed.why(lambda directory: StoreAdmin(directory).clear())

    assert cause(cleared) == "cache cleared"
    assert "the cache on disk was cleared" in told(cleared)
    assert cause(resumed.why(shutil.rmtree)) == "not written before the last run ended"
