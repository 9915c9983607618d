"""Embeddings of the loaded model, for OpenAI's clients and ollama's."""

import asyncio
import base64
from array import array
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.fields import Fields
from kvchat.core.errors import KvchatError
from kvchat.core.types import Pooling
from kvchat.server.api_errors import as_api_error
from kvchat.server.bodies import Body, read_request
from kvchat.server.ollama_fields import plain_name
from kvchat.server.service import Service, until_gone

_MOST_TEXTS = 2048
_FORMATS = ("float", "base64")
_EACH = tuple(str(pooling) for pooling in Pooling)


@dataclass(frozen=True, slots=True)
class _Embedded:
    """Vectors of length 1 in the order of their texts, and the tokens of all texts."""

    vectors: list[list[float]]
    num_tokens: int


class EmbeddingsApi:
    """The handlers of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def openai(self, request: Request) -> Response:
        fields = await read_request(request)
        self._service.require_model(fields)
        form = fields.text("encoding_format", "float")
        if form not in _FORMATS:
            raise fields.fault("encoding_format", f"must be one of {', '.join(_FORMATS)}")
        embedded = await self._embedded(request, fields, "input")
        width = len(embedded.vectors[0])
        if fields.whole("dimensions", 1) not in (None, width):
            raise fields.fault("dimensions", f"must be {width}, the width of this model")
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, form)}
            for index, vector in enumerate(embedded.vectors)
        ]
        count = embedded.num_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        name = self._service.name
        return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})

    async def ollama(self, request: Request) -> Response:
        fields = await read_request(request)
        self._service.require_model(plain_name(fields))
        embedded = await self._embedded(request, fields, "input")
        return JSONResponse(
            {
                "model": fields.text("model"),
                "embeddings": embedded.vectors,
                "prompt_eval_count": embedded.num_tokens,
            }
        )

    async def ollama_one(self, request: Request) -> Response:
        """Answer the path that ollama had before: one text, one vector."""
        fields = await read_request(request)
        self._service.require_model(plain_name(fields))
        embedded = await self._embedded(request, fields, "prompt")
        return JSONResponse({"embedding": embedded.vectors[0]})

    async def _embedded(self, request: Request, fields: Body, name: str) -> _Embedded:
        texts = _texts(fields, name)
        pooling = fields.text("pooling", str(self._service.pooling))
        if pooling not in _EACH:
            raise fields.fault("pooling", f"must be one of {', '.join(_EACH)}")
        try:
            return await until_gone(request, self._all(texts, Pooling(pooling)))
        except KvchatError as error:
            raise replace(as_api_error(error), param=name) from error

    async def _all(self, texts: list[str | list[int]], pooling: Pooling) -> _Embedded:
        vectors, num_tokens = [], 0
        for text in texts:
            ids = await self._ids(text)
            vectors.append(await asyncio.wrap_future(self._service.host.embed(ids, pooling)))
            num_tokens += len(ids)
        return _Embedded(vectors, num_tokens)

    async def _ids(self, text: str | list[int]) -> list[int]:
        if isinstance(text, list):
            return text
        encode = self._service.host.model.tokenizer.encode_raw
        return await self._service.answering.on_encoder(lambda: encode(text))


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


def _written(vector: list[float], form: str) -> list[float] | str:
    """Return a vector as numbers, or as the base64 of its float32 in little-endian order."""
    return vector if form == "float" else base64.b64encode(array("f", vector).tobytes()).decode()
