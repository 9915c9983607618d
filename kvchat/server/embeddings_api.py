"""Embeddings of the loaded model, for OpenAI's clients and ollama's."""

import asyncio
import base64
import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.fields import Fields
from kvchat.core.errors import ContextTooLong, KvchatError
from kvchat.core.types import Pooling
from kvchat.server.api_errors import as_api_error
from kvchat.server.bodies import Body, read_request
from kvchat.server.ollama_fields import read_fields
from kvchat.server.service import Service, until_gone

_MOST_TEXTS = 2048
_FORMATS = ("float", "base64")
# Of a text that is cut off, so many characters for each token of the context are encoded.
_CHARS_OF_TOKEN = 16
_EACH = tuple(str(pooling) for pooling in Pooling)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be embedded, and how.

    form        how a vector is written: float or base64
    width       how many numbers a vector has to have, None for any
    truncates   whether a text that is too long is cut off at its end
    """

    texts: list[str | list[int]]
    pooling: Pooling
    form: str = "float"
    width: int | None = None
    truncates: bool = False


@dataclass(frozen=True, slots=True)
class _Embedded:
    """Vectors of length 1 in the order of their texts, each as JSON, and the tokens of all texts.

    A vector is written when it is there: to write thousands at once would stop all streams.
    """

    vectors: list[str]
    num_tokens: int


class EmbeddingsApi:
    """The handlers of one service.

    One text after another is computed, whichever client's: the KV of several long ones at once
    would leave no room for answers, and these would fail.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()

    async def openai(self, request: Request) -> Response:
        fields = await read_request(request)
        self._service.require_model(fields)
        form = fields.text("encoding_format", "float")
        if form not in _FORMATS:
            raise fields.fault("encoding_format", f"must be one of {', '.join(_FORMATS)}")
        texts = await fields.read(lambda fields: _texts(fields, "input"))
        embedded = await self._embedded(request, fields, texts, form=form)
        data = (
            f'{{"object":"embedding","index":{index},"embedding":{vector}}}'
            for index, vector in enumerate(embedded.vectors)
        )
        count = embedded.num_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        name = self._service.name
        return _response({"object": "list", "model": name, "usage": usage}, "data", data)

    async def ollama(self, request: Request) -> Response:
        fields = await read_fields(request, self._service)
        texts: list[str | list[int]] = []
        if fields.raw("input") not in (None, "", []):  # else it asks to load the model
            texts = await fields.read(lambda fields: _texts(fields, "input"))
        truncates = fields.raw("truncate") is not False
        embedded = await self._embedded(request, fields, texts, truncates=truncates)
        name = fields.text("model") or fields.text("name")
        told = {"model": name, "prompt_eval_count": embedded.num_tokens}
        return _response(told, "embeddings", embedded.vectors)

    async def ollama_one(self, request: Request) -> Response:
        """Answer the path that ollama had before: one text, one vector."""
        fields = await read_fields(request, self._service)
        text = fields.text("prompt")
        if not text:
            return JSONResponse({"embedding": []})
        embedded = await self._embedded(request, fields, [text], truncates=True)
        return Response(f'{{"embedding":{embedded.vectors[0]}}}', media_type="application/json")

    async def _embedded(
        self, request: Request, fields: Body, texts: list[str | list[int]], **others: Any
    ) -> _Embedded:
        pooling = fields.text("pooling", str(self._service.pooling))
        if pooling not in _EACH:
            raise fields.fault("pooling", f"must be one of {', '.join(_EACH)}")
        width = fields.whole("dimensions", 1)
        wanted = _Wanted(texts, Pooling(pooling), width=width, **others)
        try:
            return await until_gone(request, self._all(fields, wanted))
        except KvchatError as error:
            named = as_api_error(error)
            raise named if named.param == "dimensions" else replace(named, param="input") from error

    async def _all(self, fields: Fields, wanted: _Wanted) -> _Embedded:
        vectors, num_tokens = [], 0
        for text in wanted.texts:
            ids = await self._ids(text, wanted.truncates)
            async with self._turn:
                embedding = self._service.host.embed(ids, wanted.pooling)
                vector = await asyncio.wrap_future(embedding)
            if wanted.width not in (None, len(vector)):
                raise fields.fault("dimensions", f"must be {len(vector)}, the model's width")
            vectors.append(_written(vector, wanted.form))
            num_tokens += len(ids)
        return _Embedded(vectors, num_tokens)

    async def _ids(self, text: str | list[int], truncates: bool) -> list[int]:
        """Return a text's ids, without encoding all of one that is far too long."""
        host = self._service.host
        codec, limit = host.model.tokenizer, host.context_limit

        def encode() -> list[int]:
            if isinstance(text, list):
                return text[:limit] if truncates else text
            if not codec.exceeds(text, limit):
                ids = codec.encode_raw(text)
                return ids[:limit] if truncates else ids
            if truncates:
                return codec.encode_raw(text[: _CHARS_OF_TOKEN * limit])[:limit]
            sentence = f"The text has far more tokens than the context holds: {limit:,}."
            raise ContextTooLong(sentence, "", 2 * limit, limit)

        return await self._service.answering.on_encoder(encode)


def _texts(fields: Fields, name: str) -> list[str | list[int]]:
    """Return the texts of a field, each as text or as token ids: one, or a list of them."""
    given = fields.raw(name)
    many: Any = given if isinstance(given, list) and not _is_ids(given) else [given]
    if len(many) > _MOST_TEXTS:
        raise fields.fault(name, f"must be at most {_MOST_TEXTS} texts")
    if not many or not all((isinstance(each, str) and each) or _is_ids(each) for each in many):
        raise fields.fault(name, "must be a text or a list of token ids, or a list of these")
    return list(many)


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    )


def _written(vector: list[float], form: str) -> str:
    """Return a vector as JSON: its numbers, or the base64 of its float32 in little-endian order."""
    in_base64 = form == "base64"
    return json.dumps(
        base64.b64encode(array("f", vector).tobytes()).decode() if in_base64 else vector
    )


def _response(told: dict[str, Any], name: str, items: Iterable[str]) -> Response:
    """Return an object with a list of items that are JSON already."""
    head = json.dumps(told, separators=(",", ":"))[:-1]
    return Response(f'{head},"{name}":[{",".join(items)}]}}', media_type="application/json")
