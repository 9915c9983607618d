"""The application: routes, health, metrics, and errors in each interface's form."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

from kvchat.chat.fields import FieldFault
from kvchat.core.text import one_line
from kvchat.core.types import Health
from kvchat.server.anthropic_api import AnthropicApi
from kvchat.server.api_errors import (
    ApiError,
    as_api_error,
    ended_server,
    failed_server,
    response_to,
)
from kvchat.server.chat_api import ChatApi
from kvchat.server.embeddings_api import EmbeddingsApi
from kvchat.server.guard import NAME, App, Guard, Limits, Receive, Scope, Send, client_of
from kvchat.server.idle import LEFT
from kvchat.server.metrics import CONTENT_TYPE
from kvchat.server.ollama_api import OllamaApi
from kvchat.server.openai_api import OpenAiApi
from kvchat.server.pages_api import PagesApi
from kvchat.server.prefill_api import PrefillApi
from kvchat.server.responses_api import ResponsesApi
from kvchat.server.responses_socket import ResponsesSockets
from kvchat.server.service import Service
from kvchat.server.text_api import TextApi

_log = logging.getLogger(__name__)

_VERSION = "/v1"
# A client's own address: its name, and what it asks for.
_NAMED = re.compile(r"/as/([\w-]{1,64})(/.*)?", re.ASCII)
# What stands behind the version; some clients are given the address without it.
_UNVERSIONED = ("chat", "completions", "embeddings", "models", "responses", "messages")

Handler = Callable[[Request], Awaitable[Response]]


def new_app(
    service: Service,
    api_key: str | None,
    limits: Limits,
    has_chat_page: bool = False,
    is_private: bool = False,
) -> App:
    """Return the ASGI application that serves one model, with `has_chat_page` to browsers too.

    `is_private`: one user's chats alone reach it, and may change drafts and pins for all requests.
    """
    openai, anthropic = OpenAiApi(service), AnthropicApi(service)
    ollama, embeddings = OllamaApi(service), EmbeddingsApi(service)
    responses, chat, text = ResponsesApi(service), ChatApi(service), TextApi(service)
    pages = PagesApi(service.host.store, api_key is not None, has_chat_page)
    gets: dict[str, Handler] = {
        "/": _front(pages.page, _health(service)),
        "/health": _health(service),
        "/metrics": _metrics(service),
        "/kvchat/conversations": pages.conversations,
        "/kvchat/conversations/{name}": pages.conversation,
        "/v1/models": openai.models,
        "/v1/models/{name:path}": openai.model,
        "/v1/responses/{name}": responses.stored.get,
        "/api/version": ollama.version,
        "/api/tags": ollama.tags,
        "/api/ps": ollama.running,
        "/v1/responses/{name}/input_items": responses.stored.input_items,
        "/kvchat/text": text.facts,
    }
    posts: dict[str, Handler] = {
        "/v1/chat/completions": openai.chat,
        "/v1/completions": openai.completions,
        "/v1/responses": responses.respond,
        "/v1/responses/compact": responses.compact,
        "/v1/messages": anthropic.messages,
        "/v1/messages/count_tokens": anthropic.count_tokens,
        "/v1/embeddings": embeddings.openai,
        "/api/embed": embeddings.ollama,
        "/api/embeddings": embeddings.ollama_one,
        "/api/chat": ollama.chat,
        "/api/generate": ollama.generate,
        "/api/show": ollama.show,
        "/kvchat/locate": chat.locate,
        "/kvchat/pin": chat.pin,
        "/kvchat/forget": chat.forget,
        "/kvchat/prefetch": chat.prefetch,
        "/kvchat/read_ahead": chat.read_ahead,
        "/kvchat/status": chat.status,
        "/kvchat/repeat_scores": chat.repeat_scores,
        "/kvchat/text": text.answer,
    }
    if is_private:
        posts["/kvchat/speculate"] = chat.speculate
        posts["/kvchat/thin_beginnings"] = chat.thin_beginnings
    if has_chat_page:
        posts["/kvchat/render"] = pages.render
    deletes: dict[str, Handler] = {"/v1/responses/{name}": responses.stored.delete}
    routes = _routes(service, gets, posts, deletes)
    sockets = ResponsesSockets(service, responses, limits.body_bytes)
    socket_route = WebSocketRoute("/v1/responses", sockets.serve)
    app = Starlette(routes=[*routes, socket_route], exception_handlers={HTTPException: _refused})
    return _with_plain_paths(Guard(app, api_key, limits))


def new_prefill_app(service: Service, prefills: PrefillApi, api_key: str, limits: Limits) -> App:
    """Return the ASGI application that only prefills for chats on other machines."""
    gets: dict[str, Handler] = {
        "/": _health(service),
        "/health": _health(service),
        "/metrics": _metrics(service),
        "/kvchat/prefill": prefills.offer,
    }
    routes = _routes(service, gets, {"/kvchat/prefill": prefills.prefill}, {})
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
    return _with_plain_paths(Guard(app, api_key, limits))


def _routes(
    service: Service,
    gets: dict[str, Handler],
    posts: dict[str, Handler],
    deletes: dict[str, Handler],
) -> list[Route]:
    return [
        Route(path, _counted(handler, path, service), methods=[method])
        for method, handlers in (("GET", gets), ("POST", posts), ("DELETE", deletes))
        for path, handler in handlers.items()
    ]


def _with_plain_paths(app: App) -> App:
    """Return an application that takes paths as clients join them: with slashes too many, behind
    the name that `kvchat launch` gives a client, and without the version that others put into the
    address.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        if "path" in scope:
            path = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
            if (named := _NAMED.fullmatch(path)) is not None:
                path, scope = named[2] or "/", {**scope, NAME: named[1]}
            is_versioned = path.lstrip("/").partition("/")[0] not in _UNVERSIONED
            scope = {**scope, "path": path if is_versioned else f"{_VERSION}{path}"}
        await app(scope, receive, send)

    return called


def _counted(handler: Handler, path: str, service: Service) -> Handler:
    """Return a handler that turns errors into responses, and counts all responses."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            response = await handler(request)
        except (ApiError, FieldFault) as error:
            response = response_to(as_api_error(error), path)
        except asyncio.CancelledError:  # the server ends
            response = response_to(ended_server(), path)
        except Exception:
            _log.exception("a request failed")
            response = response_to(failed_server(), path)
        service.metrics.note_response(path, response.status_code)
        return response

    return handle


def _front(page: Handler, health: Handler) -> Handler:
    """Return the handler of the bare address: a page for browsers, health for programs."""

    async def front(request: Request) -> Response:
        is_browser = "text/html" in request.headers.get("accept", "")
        return await (page if is_browser else health)(request)

    return front


def _health(service: Service) -> Handler:
    async def health(request: Request) -> Response:
        state = service.host.health
        told: dict[str, Any] = {"status": str(state), "model": service.name}
        if (left_s := request.scope.get(LEFT)) is not None:
            told["ends_in_s"] = round(left_s)
        if NAME in request.scope:
            told["computed_tokens"] = service.metrics.num_computed(client_of(request))
        if (sentence := _trouble(state, service)) is not None:
            told["message"] = sentence
        return JSONResponse(told, 200 if state is Health.OK else 503)

    return health


def _trouble(state: Health, service: Service) -> str | None:
    """Return a sentence on why the model does not answer any more; None if it may."""
    if state is Health.STALLED:
        silent_s = round(service.host.silent_s)
        return f"The engine has work and has made no step for {silent_s} s; restart kvchat serve."
    failure = service.host.failure
    return one_line(str(failure), 400) if failure is not None else None


def _metrics(service: Service) -> Handler:
    async def metrics(request: Request) -> Response:
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE)

    return metrics


async def _refused(request: Request, error: Exception) -> Response:
    """Answer a path or a method that there is not."""
    assert isinstance(error, HTTPException)
    is_missing = error.status_code == 404
    sentence = (
        f"There is no such path; see {_VERSION}/models." if is_missing else f"{error.detail}."
    )
    response = response_to(ApiError(error.status_code, sentence), request.url.path)
    response.headers.update(error.headers or {})  # Allow, of a method that there is not
    return response
