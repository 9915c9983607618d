"""SlotFiles: llama.cpp's server keeps a conversation's KV in a file, so that it survives a restart.

The server does this when asked, if it was started with --slot-save-path. It keeps one context in
each of its slots. A file has the name of a conversation and a digest of the model; the server
checks the tokens in it. Files are the server's: nothing removes them from here.
"""

import hashlib
import re

from kvchat.remote.client import Client
from kvchat.remote.servers import Kind, Server
from kvchat.remote.wire import Sent

# A file has the KV of the whole context, so it is not written again for a few tokens.
_WORTH_SAVING = 256
_NO_WORD = re.compile(r"[^A-Za-z0-9_-]")


class SlotFiles:
    """The files of one server's slots. Used on the event loop of its client."""

    def __init__(self, server: Server, client: Client) -> None:
        self._client = client
        self._is_able = server.kind is Kind.LLAMA_CPP
        named = f"{server.model}\0{server.files}\0{server.variant}"
        self._digest = hashlib.sha256(named.encode()).hexdigest()[:12]
        self._looked_for: set[str] = set()
        self._num_saved: dict[str, int] = {}
        self._unsaved: dict[str, tuple[int, int]] = {}

    def server_was_away(self) -> None:
        """Look for files again: the server may have been started anew."""
        self._looked_for.clear()
        self._unsaved.clear()

    async def restored(self, session_id: str) -> int | None:
        """Bring a conversation back into a slot that was never used; return the slot, else None.

        A conversation is looked for once. If all slots were used, the server was not just started,
        and probably has the conversation.
        """
        if not self._is_able or not session_id or session_id in self._looked_for:
            return None
        self._looked_for.add(session_id)
        slot = await self._unused_slot()
        if slot is None:
            return None
        asked = Sent(f"/slots/{slot}?action=restore", self._file(session_id))
        found = await self._client.ask(asked)
        if not isinstance(found, dict):
            return None
        self._num_saved[session_id] = int(found.get("n_restored", 0))
        return slot

    async def note(self, session_id: str, slot: int | None, num_tokens: int) -> None:
        """Take note of an answer in a slot, and save the slot if much is new in it."""
        if not self._is_able or not session_id or slot is None:
            return
        self._unsaved[session_id] = (slot, num_tokens)
        if num_tokens - self._num_saved.get(session_id, 0) >= _WORTH_SAVING:
            await self._save(session_id)

    async def save_all(self) -> None:
        """Save what is not saved yet."""
        for session_id in list(self._unsaved):
            await self._save(session_id)

    async def _save(self, session_id: str) -> None:
        slot, num_tokens = self._unsaved.pop(session_id)
        asked = Sent(f"/slots/{slot}?action=save", self._file(session_id))
        if await self._client.ask(asked) is None:  # the server keeps no files
            self._is_able = False
            self._unsaved.clear()
        else:
            self._num_saved[session_id] = num_tokens

    async def _unused_slot(self) -> int | None:
        slots = await self._client.ask(Sent("/slots"))
        for slot in slots if isinstance(slots, list) else ():  # none if it does not list them
            if "id_task" not in slot and not slot.get("is_processing"):
                return int(slot["id"])
        return None

    def _file(self, session_id: str) -> dict[str, str]:
        name = _NO_WORD.sub("_", session_id)
        return {"filename": f"kvchat-{name}-{self._digest}.slot"}
