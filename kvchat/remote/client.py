"""Client: one streamed request to a server after another, over HTTP.

A request is tried again only if no connection could be made, so that nothing is ever sent twice.
"""

import asyncio
import hashlib
import json
import math
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import httpx2

from kvchat.core.errors import ContextTooLong, GenerationError, KvchatError
from kvchat.core.stats import KvPlaces, ReadRates
from kvchat.core.types import CachedTokens
from kvchat.remote.servers import CONNECT_S, Address, Kind, Server, reason_of, redirect_words
from kvchat.remote.wire import Sent, error_sentence

# A server that reads a long prompt may say nothing for minutes.
_SILENCE_S = 1800.0
# The whole of a short question, however slowly its answer comes; a slot's file may be gigabytes.
_ASK_S = 120.0
_TRIES = 3
_PAUSE_S = 0.2
_MOST_LINE_BYTES = 16 << 20
_MOST_ERROR_BYTES = 64 << 10
_DATA = b"data:"
# How servers say that a prompt does not fit.
_TOO_LONG = (
    b"context_length_exceeded",
    b"exceed_context_size",
    b"maximum context length",
    b"longer than the model's context",
)


class ServerLost(GenerationError):
    """The server cannot be reached, or it broke off an answer."""


class Client:
    """Sends requests to one address. Used on one event loop, and closed there."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client = httpx2.AsyncClient(
            base_url=address.url,
            headers=address.headers,
            timeout=httpx2.Timeout(_SILENCE_S, connect=CONNECT_S),
            trust_env=not address.is_here,
            verify=address.has_certificate,
            # A server may close a connection that is kept just when it is used again.
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def stream(self, sent: Sent) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON objects that the server streams; raises GenerationError, ServerLost where
        the connection cannot be made or breaks.

        Closing the iterator closes the connection, which ends the request at the server.
        """
        request = self._client.build_request("POST", sent.path, json=sent.body)
        response = await self._connected(request)
        try:
            if response.status_code != 200:
                raise await _refusal(response)
            if response.headers.get("content-type", "").startswith("application/json"):
                yield _object(await _limited(response, _MOST_LINE_BYTES))  # it does not stream
                return
            async with aclosing(_lines(response)) as lines:
                async for line in lines:
                    if line.startswith(_DATA):
                        data = line[len(_DATA) :].strip()
                        if data == b"[DONE]":
                            return
                        yield _object(data)
        except httpx2.HTTPError as error:
            raise ServerLost(
                f"The server at {self._address.shown} broke off the answer: {reason_of(error)}.",
                "/continue goes on from there once it runs again.",
            ) from error
        finally:
            await response.aclose()

    async def _connected(self, request: httpx2.Request) -> httpx2.Response:
        for number in range(_TRIES):
            try:
                async with asyncio.timeout(_SILENCE_S):  # for headers that come byte by byte, too
                    return await self._client.send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                if number + 1 == _TRIES:
                    raise ServerLost(
                        f"No server answers at {self._address.shown}: {reason_of(error)}.",
                        "Start it and /retry, or go on with /model NAME.",
                    ) from error
            except (httpx2.HTTPError, TimeoutError) as error:
                raise ServerLost(
                    f"The server at {self._address.shown} gave no answer: {reason_of(error)}.",
                    "/retry asks again.",
                ) from error
            await asyncio.sleep(_PAUSE_S * (number + 1))
        raise AssertionError("every try returns or raises")

    async def ask(self, sent: Sent) -> Any:
        """Return the JSON that a short request is answered with; None if it is refused."""
        try:
            method = "GET" if sent.body is None else "POST"
            async with (
                asyncio.timeout(_ASK_S),
                self._client.stream(method, sent.path, json=sent.body) as response,
            ):
                if response.status_code != 200:
                    return None
                return json.loads(await _limited(response, _MOST_LINE_BYTES))
        except (httpx2.HTTPError, TimeoutError, ValueError, RecursionError, GenerationError):
            return None

    async def health(self, within_s: float) -> str | None:
        """Return the state that the server tells in time: a `Health`, if it is kvchat's.

        None if it is silent. "" if it tells something else, refuses or breaks the connection:
        requests that run will say themselves whether it has ended.
        """
        try:
            async with asyncio.timeout(within_s), self._client.stream("GET", "/health") as response:
                told = _object(await _limited(response, _MOST_ERROR_BYTES))
        except (httpx2.TimeoutException, TimeoutError):
            return None
        except (httpx2.HTTPError, GenerationError):
            return ""
        return str(told.get("status", ""))


async def _limited(response: httpx2.Response, most: int) -> bytes:
    """Return the content of a response; raises GenerationError for one above `most` bytes."""
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > most:
            raise GenerationError(f"The server's answer has more than {most >> 20} MB.")
    return bytes(content)


async def _lines(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream, with a limit on the length of one."""
    held = b""
    async for piece in response.aiter_bytes():
        held += piece
        *lines, held = held.split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
        if len(held) > _MOST_LINE_BYTES:
            raise GenerationError("The server's answer has a line of more than 16 MB.")
    if held:
        yield held


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise GenerationError("The server's answer is not JSON.") from error
    if not isinstance(found, dict):
        raise GenerationError("The server's answer is no JSON object.")
    return found


async def _refusal(response: httpx2.Response) -> KvchatError:
    """Return the error of a server that refused a request."""
    text = b""
    async for piece in response.aiter_bytes():
        text += piece
        if len(text) > _MOST_ERROR_BYTES:
            break
    if response.status_code in (401, 403):
        return GenerationError("The server refuses this key.", "Set KVCHAT_ENDPOINT_KEY.")
    if response.is_redirect:
        return GenerationError(*redirect_words(response))
    try:
        sentence = error_sentence(_object(text))
    except GenerationError:
        sentence = f"The server refused the request with HTTP status {response.status_code}."
    is_too_long = any(words in text.lower() for words in _TOO_LONG)
    hint = "/compact makes room, /new begins another conversation."
    return ContextTooLong(sentence, hint) if is_too_long else GenerationError(sentence)


# llama.cpp's server writes the KV of a slot to a file when asked, if it was started with --slot-
# save-path. It keeps one context in each of its slots. A file has the name of a conversation and a
# digest of the model; the server checks the tokens in it. Files are the server's: nothing removes
# them from here.

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


_NO_TIME = math.inf


class ServerKv:
    """Asks over the client of one server, and waits `patience_s` seconds for each answer.

    Used on the client's event loop. All raise GenerationError if no answer comes, or a strange one.
    """

    def __init__(self, client: Client, patience_s: float) -> None:
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

    async def _ask(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        found = None
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                found = await self._client.ask(Sent(f"/kvchat/{name}", body))
        if not isinstance(found, dict):
            raise GenerationError("The server does not tell this.")
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
