"""/pin --share on a real engine, over a directory that two machines reach."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.core.config import SharedConfig
from kvchat.core.errors import UsageError
from support.script_commands import carry_out
from support.tiny_host import answer_options, finish, tiny_host

MANUAL = "Of the twelve ships in the harbour three are red and nine are blue. "
SYSTEM = "You count the ships of the harbour, and tell their colours."

NewChat = Callable[..., ChatController]


@pytest.fixture
def new_chat(tiny: Path, tmp_path: Path) -> Iterator[NewChat]:
    """Return what begins a chat on a machine of the given name, with the shared store or none."""
    hosts: list[ChatHost] = []

    def begin(machine: str, url: str | None = f"file://{tmp_path}/nas") -> ChatController:
        shared = SharedConfig(url, "a secret of the team", first_byte_s=10.0) if url else None
        host = tiny_host(tiny, None, kept=tmp_path / machine, shared=shared)
        hosts.append(host)
        host.wait_until_ready()
        options = replace(answer_options(), shares_system=url is not None)
        kept = StoreAdmin(tmp_path / machine)
        return ChatController(host, lambda *_: host, None, options, SYSTEM, kept=kept)

    yield begin
    for host in hosts:
        host.close()


def records(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "nas").rglob("*.kv"))


def test_a_pin_is_shared_only_where_that_is_asked(new_chat: NewChat, tmp_path: Path) -> None:
    chat = new_chat("one")
    (tmp_path / "manual.txt").write_text(MANUAL * 3)

    assert "Shared" not in carry_out(chat, f"/pin manual {tmp_path}/manual.txt")
    assert not records(tmp_path)

    said = carry_out(chat, f"/pin --share manual {tmp_path}/manual.txt")
    assert "Pinned manual" in said
    assert "Shared: " in said
    assert records(tmp_path)


def test_a_system_prompt_goes_there_by_itself_and_no_message_does(new_chat, tmp_path):
    chat = new_chat("one")

    finish(chat.ask("Which ships are red?"))
    chat.host.close()

    there = sum(path.stat().st_size for path in records(tmp_path))
    other = new_chat("other")
    finish(other.ask("How many ships are there?"))
    other.host.close()
    assert there
    assert sum(path.stat().st_size for path in records(tmp_path)) == there


def test_without_a_shared_cache_sharing_is_refused(new_chat: NewChat, tmp_path: Path) -> None:
    chat = new_chat("one", None)
    (tmp_path / "manual.txt").write_text(MANUAL)

    with pytest.raises(UsageError, match="no shared cache"):
        carry_out(chat, f"/pin --share manual {tmp_path}/manual.txt")
