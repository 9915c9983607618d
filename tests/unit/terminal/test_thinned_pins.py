"""`/pin --keep` and `/set kv-budget`: answers over less KV, through restarts, forks and retries."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.attachment import PinFiles
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.core.errors import UsageError
from kvchat.core.types import Usage
from support.script_commands import carry_out
from support.tiny_host import answer_options, finish
from unit.terminal.conftest import BeginHost

MANUAL = "Of the twelve ships in the harbour three are red and nine are blue, so they say.\n" * 3


class Chat:
    """One life of the program on a store and a state directory that survive it."""

    def __init__(self, host: ChatHost, place: Path) -> None:
        pins = PinFiles(place / "state" / "pins.json")
        kept = StoreAdmin(place / "kv")
        self.controller = ChatController(
            host, lambda *_: host, None, answer_options(), kept=kept, pins=pins
        )

    def do(self, line: str) -> str:
        return carry_out(self.controller, line, num_columns=400)

    def ask(self, text: str) -> Usage:
        self.controller.attach_mentioned(text)
        return finish(self.controller.ask(text)).usage

    def retry(self) -> Usage:
        return finish(self.controller.retry(self.controller.options)).usage

    @property
    def said(self) -> str:
        return self.controller.require_session().conversation.path()[-1].text


NewChat = Callable[[], Chat]


@pytest.fixture
def new_chat(begin_host: BeginHost, tiny: Path, tmp_path: Path) -> NewChat:
    store, kept = SessionStore(tmp_path / "sessions"), tmp_path / "kv"
    return lambda: Chat(begin_host(tiny, store, kept=kept), tmp_path)


@pytest.fixture
def manual(tmp_path: Path) -> Path:
    (tmp_path / "manual.md").write_text(MANUAL)
    return tmp_path / "manual.md"


def test_chats_over_a_pin_that_keeps_a_share_of_its_positions(new_chat, manual, tmp_path):
    """In a new process its positions are known, and its KV comes from the disk; turns, a retry and
    a fork go on over it, until all of it is to stay.
    """
    told = new_chat().do(f"/pin ships {manual} --keep 25%")
    [share, num_pinned] = re.findall(r"Kept (\d+)% of (\d+) positions \(KVzip\)", told)[0]
    assert 25 <= int(share) <= 30
    state = tmp_path / "state" / "thinned_pins.json"
    assert state.stat().st_mode & 0o777 == 0o600
    assert "harbour" not in state.read_text()

    chat = new_chat()
    first = chat.ask("How many are red in @ships?")
    assert first.cached.disk >= int(num_pinned) - 8
    assert first.dropped is not None
    assert (first.dropped.method, first.dropped.num_tokens) == ("KVzip", int(num_pinned))
    thinned = chat.said
    again = chat.retry()
    assert (chat.said, again.cached.device) == (thinned, again.prompt_tokens - 1)
    second = chat.ask("And blue?")
    assert second.cached.device >= again.prompt_tokens
    chat.do("/fork")
    assert chat.ask("Why?").cached.device >= second.prompt_tokens
    assert f"ships: keeps {share}% of its KV in memory" in chat.do("/pin list")

    assert "Pinned" in chat.do("/pin ships --keep 100%")
    assert json.loads(state.read_text())["thinned pins"] == {}
    chat.do("/new")
    exact = chat.ask("How many are red in @ships?")
    assert exact.dropped is None
    assert exact.cached.total >= int(num_pinned) - 8


def test_a_pin_that_is_removed_has_all_of_its_kv_again(new_chat: NewChat, manual: Path) -> None:
    chat = new_chat()
    chat.do(f"/pin ships {manual} --keep 25%")
    chat.do("/unpin ships")
    assert chat.ask(f"How many are red in @{manual}?").dropped is None


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("{} --keep 512M", "--keep is '512M', but must be a share like 25%."),
        ("{} --keep", "--keep is '', but must be a size like"),
        ("--keep 25%", "--keep needs a pin of files."),
    ],
)
def test_a_share_that_cannot_be_kept_is_one_sentence(new_chat, manual, arguments, problem):
    with pytest.raises(UsageError, match=re.escape(problem)):
        new_chat().do(f"/pin {arguments.format(manual)}")


@pytest.mark.parametrize(
    "damage", ["", "{", '{"version": 1, "thinned pins": {"a": {"model": "x"}, "b": 3}}']
)
def test_damaged_positions_count_as_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / "thinned_pins.json").write_text(damage)
    assert PinFiles(tmp_path / "pins.json").thinned.of_model("x") == []


def test_a_budget_is_for_one_question(new_chat: NewChat, manual: Path) -> None:
    """The next one finds all of the document's KV."""
    chat = new_chat()
    assert chat.do("/set kv-budget 60%") == "kv-budget is 60%.\n"
    first = chat.ask(f"How many are red in @{manual}?")
    assert first.dropped is not None
    assert first.dropped.method == "SnapKV"
    second = chat.ask("And blue?")
    assert second.cached.device >= first.prompt_tokens
    assert second.dropped is not None
    assert chat.do("/set kv-budget off") == "kv-budget is all of it.\n"
    assert chat.ask("Why?").dropped is None
    chat.controller.options = replace(chat.controller.options, kv_budget="1M")
    assert chat.ask("Really?").dropped is None, "1 MiB has room for all"
