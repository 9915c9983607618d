"""Finds out what kind of server an address is, which model it runs, and what it takes.

Kinds differ in which paths they have, whether they take token ids, and which sampling parameters.
A server that is none of the known kinds gets the plain form of OpenAI's chat interface.
"""

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import httpx2

from kvchat.core.errors import ModelError, TimedOut
from kvchat.core.text import one_line
from kvchat.remote.address import Address
from kvchat.remote.kinds import LARGE_CONTEXT, Kind, Server

CONNECT_S = 5.0
_ASK_S = 10.0
# Room for the list of a service with 100,000 models.
_MOST_BYTES = 64 << 20
_MOST_NAMED = 8
_CLOSED = re.compile("closed connection|disconnected")
_ERROR_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


_OWNERS = {
    "kvchat": Kind.KVCHAT,
    "llamacpp": Kind.LLAMA_CPP,
    "vllm": Kind.VLLM,
    "sglang": Kind.SGLANG,
    "tensorrt_llm": Kind.TENSORRT_LLM,
    "library": Kind.OLLAMA,
}
_TRANSFORMERS_PATHS = frozenset({"/load_model", "/reset", "/v1/chat/completions"})


class Asker:
    """Asks a server short questions, each answered by one JSON object. A context manager.

    A question takes ten seconds at most, however slowly the server sends; all take `limit_s`.
    """

    def __init__(self, address: Address, limit_s: float | None = None) -> None:
        self._address = address
        self._limit_s = limit_s if limit_s is not None else math.inf
        self._began_s = time.monotonic()
        # On a thread of its own: the caller's may have a running event loop.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = httpx2.AsyncClient(
            base_url=address.url,
            headers=address.headers,
            timeout=httpx2.Timeout(_ASK_S, connect=CONNECT_S),
            trust_env=not address.is_here,
            verify=address.has_certificate,
        )

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *error: object) -> None:
        self._wait(self._client.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return what the server says to a GET, or to a POST with a body; None if it says nothing.

        Raises ModelError if it cannot be reached, takes too long, wants another key or sends
        elsewhere: a key is for one address, so that no redirect is followed. Raises TimedOut at
        the limit of all questions.
        """
        left_s = self._began_s + self._limit_s - time.monotonic()
        try:
            found = self._wait(self._asked(path, body, min(left_s, _ASK_S)))
        except (httpx2.TransportError, TimeoutError) as error:
            if isinstance(error, TimeoutError) and left_s < _ASK_S:
                raise TimedOut(
                    f"The server at {self._address.shown} did not answer within "
                    f"{self._limit_s:g} s."
                ) from error
            raise ModelError(
                f"No server answers at {self._address.shown}: {reason_of(error)}.",
                "Start it, or check --endpoint.",
            ) from error
        except (ValueError, RecursionError, httpx2.HTTPError):
            return None
        return found if isinstance(found, dict) else None

    def ask_further(self, path: str) -> dict[str, Any] | None:
        """Return what a server that has answered says to another GET, None for anything else.

        A gateway may refuse, or send elsewhere, a path that it does not know.
        """
        try:
            return self.ask(path)
        except ModelError:
            return None

    def _wait(self, question: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C the question is still asked
            raise

    async def _asked(self, path: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        method = "GET" if body is None else "POST"
        async with (
            asyncio.timeout(limit_s),
            self._client.stream(method, path, json=body) as response,
        ):
            self._require_welcome(response)
            if response.status_code != 200:
                return None
            text = bytearray()
            async for piece in response.aiter_bytes():
                text += piece
                if len(text) > _MOST_BYTES:
                    return None
        return json.loads(text)

    def _require_welcome(self, response: httpx2.Response) -> None:
        """Raise ModelError if the server wants another key, or a request to another address."""
        if response.status_code in (401, 403):
            raise ModelError(
                f"The server at {self._address.shown} refuses this key.", "Set KVCHAT_ENDPOINT_KEY."
            )
        if response.is_redirect:
            raise ModelError(*redirect_words(response))

    def tokens(self, server: "Server", text: str, has_control: bool) -> list[int] | None:
        """Return the ids of a text as the server encodes it; None if it does not tell.

        With `has_control` the text of a control token is that token.
        """
        if server.kind is Kind.LLAMA_CPP:
            body = {"content": text, "add_special": False, "parse_special": has_control}
        else:
            body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        found = self.ask("/tokenize", body)
        ids = found.get("tokens") if found is not None else None
        return ids if isinstance(ids, list) else None


def reason_of(error: Exception) -> str:
    """Return an HTTP library's error in a few words."""
    if isinstance(error, httpx2.TimeoutException | TimeoutError):
        return "it took too long"
    is_protocol = isinstance(error, httpx2.RemoteProtocolError)
    if isinstance(error, httpx2.ReadError) or (is_protocol and _CLOSED.search(str(error))):
        return "it closed the connection"
    words = _ERROR_NUMBER.sub("", one_line(str(error), 120)).rstrip(".")
    return words[:1].lower() + words[1:] or type(error).__name__


def redirect_words(response: httpx2.Response) -> tuple[str, str]:
    """Return what to say, and the hint, of a server that sends to another address."""
    target = one_line(str(response.headers.get("location", "")), 120)
    return (
        f"The server sends to another address: {target}.",
        "Give that address with --endpoint if you trust it. A key is never sent on.",
    )


def find_server(address: Address, limit_s: float | None = None) -> Server:
    """Ask a server what it is. Raises ModelError if none answers or it has no such model, and
    TimedOut if that takes longer than `limit_s`.
    """
    with Asker(address, limit_s) as asker:
        listed = asker.ask("/v1/models")
        models = _models(listed)
        if not models and asker.ask_further("/health") is None and listed is None:
            raise ModelError(
                f"The server at {address.shown} has no model interface of a known form.",
                "kvchat needs /v1/models and /v1/chat/completions.",
            )
        kind = _kind(asker, models)
        if kind is Kind.TRANSFORMERS:
            return Server(address, kind, address.model)
        return _described(asker, address, kind, _chosen(address, models))


def _kind(asker: Asker, models: list[dict[str, Any]]) -> Kind:
    """Return the kind of a server that lists these models."""
    owners = {str(model.get("owned_by", "")).lower() for model in models}
    kinds = {_OWNERS.get(owner, Kind.OTHER) for owner in owners}
    kind = kinds.pop() if len(kinds) == 1 else Kind.OTHER
    if kind not in (Kind.OTHER, Kind.OLLAMA):
        return kind
    if asker.ask_further("/api/version") is not None:
        return Kind.OLLAMA
    if _tgi_context(asker) is not None:  # it lists its model as owned by that model
        return Kind.TGI
    # `transformers serve` lists what the Hugging Face cache has, which may not be what it runs.
    paths = (asker.ask_further("/openapi.json") or {}).get("paths")
    is_transformers = isinstance(paths, dict) and paths.keys() >= _TRANSFORMERS_PATHS
    return Kind.TRANSFORMERS if is_transformers else Kind.OTHER


def _models(listed: dict[str, Any] | None) -> list[dict[str, Any]]:
    data = listed.get("data") if listed is not None else None
    items = data if isinstance(data, list) else []
    return [item for item in items if isinstance(item, dict) and isinstance(item.get("id"), str)]


def _chosen(address: Address, models: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of the model to ask for."""
    names = [model["id"] for model in models]
    if address.model in names:
        return models[names.index(address.model)]
    if address.model and names:
        raise ModelError(
            f"The server at {address.shown} has no model {one_line(address.model)}.",
            f"It has {_some(names)}.",
        )
    if len({str(model.get("root") or model["id"]) for model in models}) == 1:
        return models[0]  # one model, perhaps with several names
    if not address.model and models:
        raise ModelError(
            f"The server at {address.shown} has several models.",
            f"Name one with --model: {_some(names)}.",
        )
    return {"id": address.model or "default"}


def _some(names: list[str]) -> str:
    shown = ", ".join(one_line(name, 60) for name in names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def _described(asker: Asker, address: Address, kind: Kind, chosen: dict[str, Any]) -> Server:
    """Return the server with what its kind says of the model elsewhere."""
    limit = chosen.get("context_length", chosen.get("max_model_len"))
    files = chosen.get("root")
    if kind is Kind.LLAMA_CPP:
        about = asker.ask("/props") or {}
        settings = about.get("default_generation_settings")
        limit = settings.get("n_ctx") if isinstance(settings, dict) else limit
        files = about.get("model_path")
    elif kind is Kind.SGLANG:
        files = (asker.ask("/get_model_info") or {}).get("model_path", files)
    elif kind is Kind.TGI:
        limit = _tgi_context(asker)
    elif kind is Kind.OLLAMA:
        limit = _ollama_context(asker, chosen["id"])
    return Server(
        address,
        kind,
        chosen["id"],
        files if isinstance(files, str) else "",
        str(chosen.get("tokenizer") or ""),
        json.dumps(chosen.get("meta")) if kind is Kind.LLAMA_CPP else "",
        limit if type(limit) is int and limit > 0 else LARGE_CONTEXT,
    )


def _tgi_context(asker: Asker) -> int | None:
    """Return the context that a TGI router gives its model; None of what is no such router."""
    about = asker.ask_further("/info") or {}
    limit = about.get("max_total_tokens")
    return limit if "model_id" in about and type(limit) is int else None


def _ollama_context(asker: Asker, model: str) -> int | None:
    """Return the context that ollama gives a model: that of the loaded one, else its file's wish.

    It cuts off what is longer without a word.
    """
    loaded = (asker.ask_further("/api/ps") or {}).get("models")
    for entry in loaded if isinstance(loaded, list) else ():
        if isinstance(entry, dict) and model in (entry.get("name"), entry.get("model")):
            limit = entry.get("context_length")
            return limit if type(limit) is int else None
    shown = asker.ask("/api/show", {"model": model})
    for line in str((shown or {}).get("parameters", "")).splitlines():
        name, _, value = line.partition(" ")
        if name == "num_ctx" and value.strip().isdigit():
            return int(value)
    return None
