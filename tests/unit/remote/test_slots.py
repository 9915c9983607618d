"""llama.cpp's slots: a conversation is saved there and found again after the server's restart."""

import asyncio
from typing import Any

from kvchat.remote.address import address_of
from kvchat.remote.client import Client
from kvchat.remote.server_kv import SlotFiles
from kvchat.remote.servers import find_server
from support.fake_llm_server import FakeServer, Refusal, fake_server, models

UNUSED = [{"id": 0, "is_processing": False, "id_task": 3}, {"id": 1, "is_processing": False}]
USED = UNUSED[:1]


class Slots:
    """The files of a server that saves slots, unless it `refuses`."""

    def __init__(self, refuses: bool = False) -> None:
        self.files: dict[str, str] = {}
        self.refuses = refuses

    def author(self, path: str, body: Any) -> object:
        slot, action = path.removeprefix("/slots/").split("?action=")
        if self.refuses:
            return Refusal(501, {"error": "no slots"})
        if action == "save":
            self.files[body["filename"]] = slot
            return {"n_saved": 1}
        if body["filename"] not in self.files:
            return Refusal(400, {"error": "no such file"})
        return {"n_restored": 40}


def gets(slots: object) -> dict[str, object]:
    return {"/v1/models": models("m", "llamacpp"), "/props": {}, "/slots": slots}


async def with_files(fake: FakeServer, use: Any) -> Any:
    client = Client(address_of(fake.url))
    try:
        return await use(SlotFiles(find_server(address_of(fake.url)), client))
    finally:
        await client.close()


def test_a_saved_conversation_is_restored_into_a_slot_that_was_never_used() -> None:
    slots = Slots()

    async def first(files: SlotFiles) -> None:
        await files.note("chat-1", 0, 20)
        assert not slots.files  # little is new; it is saved at the end
        await files.save_all()

    async def second(files: SlotFiles) -> tuple[int | None, ...]:
        return tuple([await files.restored(name) for name in ("chat-1", "chat-1", "chat-2", "")])

    with fake_server(slots.author, gets(UNUSED)) as fake:
        asyncio.run(with_files(fake, first))
        assert asyncio.run(with_files(fake, second)) == (1, None, None, None)
    [name] = slots.files
    assert name.startswith("kvchat-chat-1-")


def test_much_new_text_is_saved_at_once() -> None:
    slots = Slots()

    async def answers(files: SlotFiles) -> None:
        await files.note("c", 2, 300)
        assert list(slots.files.values()) == ["2"]
        slots.files.clear()
        await files.note("c", 2, 310)
        assert not slots.files

    with fake_server(slots.author, gets(UNUSED)) as fake:
        asyncio.run(with_files(fake, answers))


def test_a_server_that_has_worked_for_others_keeps_its_slots() -> None:
    async def look(files: SlotFiles) -> int | None:
        return await files.restored("c")

    with fake_server(Slots().author, gets(USED)) as fake:
        assert asyncio.run(with_files(fake, look)) is None
        assert fake.asked[-1].path == "/slots"


def test_a_server_that_saves_nothing_is_asked_once() -> None:
    async def answers(files: SlotFiles) -> None:
        await files.note("c", 0, 300)
        await files.note("c", 0, 900)
        await files.save_all()

    with fake_server(Slots(refuses=True).author, gets(UNUSED)) as fake:
        asyncio.run(with_files(fake, answers))
        assert sum("action=save" in asked.path for asked in fake.asked) == 1


def test_after_the_server_was_away_files_are_looked_for_again() -> None:
    slots = Slots()

    async def look(files: SlotFiles) -> list[int | None]:
        await files.note("c", 0, 300)
        found = [await files.restored("c"), await files.restored("c")]
        files.server_was_away()
        return [*found, await files.restored("c")]

    with fake_server(slots.author, gets(UNUSED)) as fake:
        assert asyncio.run(with_files(fake, look)) == [1, None, 1]
