"""What a server is asked about the KV of conversations: files of slots, and where KV is."""

import asyncio
import hashlib
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from kvchat.core.errors import GenerationError, UsageError
from kvchat.core.stats import EngineStatus, KvPlaces, ReadRates, status_of
from kvchat.core.types import CachedTokens, KeptPositions
from kvchat.remote.exchange import ServerClient
from kvchat.remote.kinds import Kind, Server
from kvchat.remote.wire import Sent

# llama.cpp's server writes the KV of a slot to a file when asked, if it was started with --slot-
# save-path. It keeps one context in each of its slots. A file has the name of a conversation and a
# digest of the model; the server checks the tokens in it. Files are the server's: nothing removes
# them from here.

# A file has the KV of the whole context, so it is not written again for a few tokens.
_WORTH_SAVING = 256
_NO_WORD = re.compile(r"[^A-Za-z0-9_-]")


class SlotFiles:
    """The files of one server's slots. Used on the event loop of its client."""

    def __init__(self, server: Server, client: ServerClient) -> None:
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


_NO_TIME = math.inf
# A pass of the model over some hundred tokens, behind other requests.
_SCORING_S = 120.0


class ServerKv:
    """Asks over the client of one server, and waits `patience_s` seconds for each answer.

    Used on the client's event loop. All raise GenerationError if no answer comes, or a strange one.
    """

    def __init__(self, client: ServerClient, patience_s: float) -> None:
        self._client = client
        self._patience_s = patience_s

    async def locate(self, contexts: Sequence[Sequence[int]]) -> list[KvPlaces]:
        found = await self._ask("locate", {"contexts": [list(ids) for ids in contexts]})
        try:
            places = [_place(place) for place in found["places"]]
        except (KeyError, TypeError, ValueError) as error:
            raise GenerationError("The server's answer has an unknown form.") from error
        if len(places) != len(contexts):
            raise GenerationError("The server's answer has an unknown form.")
        return places

    async def pin(self, token_ids: Sequence[int], label: str, ttl_s: float) -> int:
        """Pin a context for a time, or for ever if that is infinite."""
        body: dict[str, Any] = {"token_ids": list(token_ids), "label": label}
        found = await self._ask("pin", body | ({"ttl_s": ttl_s} if ttl_s < math.inf else {}))
        return int(found.get("num_tokens", 0))

    async def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> None:
        ids, kept = [list(context) for context, _ in contexts], [kept for _, kept in contexts]
        await self._ask("forget", {"contexts": ids, "kept": kept})

    async def prefetch(self, token_ids: Sequence[int]) -> None:
        await self._ask("prefetch", {"token_ids": list(token_ids)})

    async def read_ahead(self, token_ids: Sequence[int]) -> None:
        """Let the server prefill a context while it has nothing else to do; none ends that."""
        await self._ask("read_ahead", {"token_ids": list(token_ids)})

    async def status(self) -> EngineStatus:
        found = await self._ask("status", {})
        try:
            return status_of(found)
        except (KeyError, TypeError, ValueError) as error:
            raise GenerationError("The server's answer has an unknown form.") from error

    async def speculate(self, mode: str) -> None:
        """Switch drafts, for all that the server answers; raises UsageError where it cannot."""
        await self._ask("speculate", {"mode": mode})

    async def repeat_scores(self, token_ids: Sequence[int], part: Sequence[int]) -> Any:
        """Return a text's attention to the tokens before it; raises UsageError as the engine."""
        body = {"token_ids": list(token_ids), "part": list(part)}
        return (await self._ask("repeat_scores", body, _SCORING_S)).get("scores")

    async def thin_beginnings(self, kept: Sequence[KeptPositions]) -> None:
        await self._ask("thin_beginnings", {"kept": [asdict(each) for each in kept]})

    async def _ask(
        self, name: str, body: dict[str, Any], patience_s: float = 0.0
    ) -> dict[str, Any]:
        """Return a server's answer; raises UsageError with its sentence where it cannot do it."""
        found = None
        with suppress(TimeoutError):
            async with asyncio.timeout(max(patience_s, self._patience_s)):
                found = await self._client.ask(Sent(f"/kvchat/{name}", body))
        if not isinstance(found, dict):
            raise GenerationError("The server does not tell this.")
        if "failed" in found:
            raise UsageError(str(found["failed"]), str(found.get("hint") or ""))
        return found


def _place(told: dict[str, Any]) -> KvPlaces:
    cached = told["cached"]
    rates = ReadRates(
        told["computed"],
        told["from_disk"] or _NO_TIME,
        told["from_host"] or _NO_TIME,
        told.get("half_context") or _NO_TIME,
    )
    tokens = CachedTokens.of({name: int(n) for name, n in cached.items() if name != "total"})
    return KvPlaces(int(told["num_tokens"]), tokens, rates, int(told["block_size"]))
