"""`kvchat serve`: offers the model and its cache to other programs over HTTP."""

import gc
import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kvchat.cli.build import (
    answers_path,
    ask_options,
    open_host,
    saved_places,
    settings_of,
    user_paths,
)
from kvchat.cli.lines import say
from kvchat.cli.log_file import close_log
from kvchat.cli.model_names import short_name, whole_name
from kvchat.cli.running_server import Announcement, announced
from kvchat.cli.server_key import KeyRequest, is_used_by_others, server_key
from kvchat.cli.settings import API_KEY_VARIABLE, Settings
from kvchat.cli.shared_cache import shared_config
from kvchat.core.errors import TimedOut, UsageError
from kvchat.core.events import LoadEvent, LoadFailed, ModelReady
from kvchat.core.paths import require_working_directory
from kvchat.core.types import Pooling

if TYPE_CHECKING:
    import socket

    from kvchat.cache.shared.prefill_box import PromptKey
    from kvchat.chat.host import ChatHost
    from kvchat.chat.stabiliser import Stabiliser
    from kvchat.server.guard import App
    from kvchat.server.service import Service

_MOST_STABILISED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """What `kvchat serve` was asked for.

    key          where the key of clients comes from
    names        further names that requests may give the model; `*` stands for any text
    stabilises   whether lines of system prompts that change are moved to the end; None for those
                 of agents, which offer tools
    socket       the path of a socket to listen on in place of host and port, "" for none
    prefills     whether it only prefills for chats on other machines
    pooling      which hidden states make an embedding
    has_chat_page   whether browsers get a page to chat on
    """

    host: str
    port: int
    key: KeyRequest
    names: tuple[str, ...]
    stabilises: bool | None = None
    prefills: bool = False
    socket: str = ""
    has_chat_page: bool = False
    pooling: str = "mean"


def run_server(flags: dict[str, Any], request: ServeRequest) -> int:
    """Load the model and serve it until a signal ends the server; return the exit code."""
    require_working_directory()
    from kvchat.server.idle import IdleWatch
    from kvchat.server.serving import serve

    settings = settings_of(flags)
    settings = settings.with_model(whole_name(settings, settings["model"]))
    if settings["incognito"]:
        close_log()
    prompt_key = None
    if request.prefills:
        settings, prompt_key = _for_prefilling(settings)
    api_key = prompt_key.bearer if prompt_key is not None else _api_key(settings, request)
    if request.has_chat_page:
        _require_key(api_key, request)
    bound = _bound(request)
    own_file = os.stat(request.socket).st_ino if request.socket else 0
    host = open_host(settings, _tell, attaches=False)  # it would take itself for the next one
    service = _new_service(settings, host, request)
    try:
        app = _new_app(service, api_key, prompt_key, request)
        minutes = settings["keep_alive"]
        watch = IdleWatch(app, minutes * 60, lambda: host.ready is not None) if minutes else None
        is_for_chats = prompt_key is None
        place = _place(request, bound, api_key, is_spare=bool(minutes))
        port = 0 if place.socket else bound.getsockname()[1]
        shown = place.socket or f"http://{_bracketed(request.host)}:{port}{'/v1' * is_for_chats}"
        page = _page_address(request.host, port, api_key or "") if request.has_chat_page else ""
        state = user_paths().state
        with announced(settings, state, place) if is_for_chats else nullcontext():
            code = serve(
                watch or app,
                bound,
                lambda: _say_address(service.name, shown, page),
                lambda: (
                    host.failure is not None
                    or _is_late(host, settings["timeout"])
                    or (watch is not None and watch.is_over)
                ),
            )
            if host.failure is None and settings["timeout"] is not None:
                host.loading_left_s(settings["timeout"])  # raises where it took too long
            return host.failure.exit_code if host.failure is not None else code
    finally:
        service.answering.close()
        service.responses.close()
        host.close()
        if request.socket:
            _remove_socket(request.socket, own_file)


def _bound(request: ServeRequest) -> "socket.socket":
    """Return the socket to listen on; raises UsageError where there can be none."""
    from kvchat.server.serving import bound_socket, private_socket

    if request.socket and (request.prefills or request.has_chat_page):
        raise UsageError("Only chats of this user reach a socket: no --web and no --role with it.")
    if request.socket:
        return private_socket(request.socket)
    return bound_socket(request.host, request.port)


def _remove_socket(path: str, own_file: int) -> None:
    """Remove the file of a socket, unless another server has put its own there."""
    with suppress(OSError):
        if os.lstat(path).st_ino == own_file:
            os.unlink(path)


def _place(
    request: ServeRequest, bound: "socket.socket", key: str | None, is_spare: bool
) -> Announcement:
    """Return how chats on this machine reach the server."""
    from kvchat.server.guard import is_loopback

    if request.socket:
        return Announcement("", key, str(Path(request.socket).absolute()), is_spare)
    here = request.host if is_loopback(request.host) else "127.0.0.1"
    return Announcement(f"http://{_bracketed(here)}:{bound.getsockname()[1]}", key, "", is_spare)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _api_key(settings: Settings, request: ServeRequest) -> str | None:
    from kvchat.server.guard import is_loopback

    if request.socket and request.key == KeyRequest():  # the file's mode lets in this user alone
        return None

    state = None if settings["incognito"] else user_paths().state
    is_local, is_terminal = is_loopback(request.host), sys.stderr.isatty()
    return server_key(request.key, os.environ, is_local, state, say, is_used_by_others, is_terminal)


def _require_key(api_key: str | None, request: ServeRequest) -> None:
    """Raise UsageError where the chat page would be open to all, or where there is none."""
    if request.prefills:
        raise UsageError("--role prefill answers no chats, so --web has no page to give.")
    if api_key is None:
        raise UsageError("--web needs a key.", f"--api-key-file or {API_KEY_VARIABLE} gives one.")


def _page_address(host: str, port: int, key: str) -> str:
    """Return the address of the chat page as another machine reaches it.

    The key behind `#` is not sent with the request; the page takes it from there. It is for a
    terminal only: a log stays.
    """
    from kvchat.server.serving import own_address

    address = f"http://{own_address(host)}:{port}/"
    return f"{address}#key={quote(key, safe='')}" if sys.stderr.isatty() else address


def _for_prefilling(settings: Settings) -> "tuple[Settings, PromptKey]":
    """Return the settings of a server that only prefills, and what opens the prompts.

    Prompts of other machines are not kept on this one's disk, unless a flag says so. Raises
    UsageError without a shared cache.
    """
    from kvchat.cache.shared.prefill_box import PromptKey

    values = {**settings.values, "prefill_at": None}
    if not settings.is_flag("disk_cache"):
        values["disk_cache"] = "0"
    settings = Settings(values, settings.origins)
    config = shared_config(settings, os.environ)
    if config is None:
        raise UsageError("--role prefill writes to a shared cache.", "--shared-cache names it.")
    return settings, PromptKey(config.secret)


def _new_app(
    service: "Service",
    api_key: str | None,
    prompt_key: "PromptKey | None",
    request: ServeRequest,
) -> "App":
    from kvchat.server.app import new_app, new_prefill_app
    from kvchat.server.guard import Limits
    from kvchat.server.prefill_api import PrefillApi

    if prompt_key is None:
        return new_app(service, api_key, Limits(), request.has_chat_page, bool(request.socket))
    prefills = PrefillApi(service, prompt_key.opened)
    return new_prefill_app(service, prefills, prompt_key.bearer, Limits())


def _is_late(host: "ChatHost", limit_s: float | None) -> bool:
    """Whether the model takes longer to load than it may."""
    try:
        return limit_s is not None and host.loading_left_s(limit_s) <= 0
    except TimedOut:
        return True


def _new_service(settings: Settings, host: "ChatHost", request: ServeRequest) -> "Service":
    from kvchat.chat.answer_memory import AnswerMemory, ResponseMemory
    from kvchat.chat.prefixes import ResentChats
    from kvchat.server.answering import Answering
    from kvchat.server.metrics import Metrics
    from kvchat.server.service import Service

    is_kept = not settings["incognito"] and settings["cache"]
    path = answers_path(settings) if is_kept else None
    metrics = Metrics()
    chats = ResentChats(host, AnswerMemory(path), _new_stabiliser(host, path, request.stabilises))
    options = ask_options(settings, leaves_out=("format",)).for_model(host.model.sampling_defaults)
    name = host.model.name
    return Service(
        host,
        Answering(chats, metrics, settings.system, settings["timeout"]),
        metrics,
        options,
        (short_name(name), *request.names),
        ResponseMemory(path, host.model.tokenizer),
        str(Path(name).absolute()) if Path(name).exists() else name,
        Pooling(request.pooling),
        replace(saved_places(settings), answers=None, server=lambda: None),
    )


def _new_stabiliser(
    host: "ChatHost", path: Path | None, stabilises: bool | None
) -> "Stabiliser | None":
    from kvchat.chat.answer_memory import ResponseMemory
    from kvchat.chat.stabiliser import Stabiliser

    if stabilises is False:
        return None
    codec = host.model.tokenizer
    records = ResponseMemory(path, codec, _MOST_STABILISED_BYTES, table="stabilised")
    return Stabiliser(records, is_for_all=bool(stabilises))


def _tell(event: LoadEvent) -> None:
    """Report the end of loading. Called on the engine's thread."""
    if isinstance(event, ModelReady):
        # What is loaded now stays. Python need not look through it for garbage at each full
        # collection, which would stop all streams for a while.
        gc.freeze()
        for note in event.notes:
            say(note)
        kv = f", KV in {event.kv_dtype}" if event.kv_dtype else ""
        say(
            f"ready after {event.load_s:.1f} s: {event.device}, {event.dtype}{kv}, "
            f"{event.context_limit:,} tokens of context"
        )
    elif isinstance(event, LoadFailed):
        say(str(event.error))


def _say_address(name: str, address: str, page: str) -> None:
    say(f"{name} at {address}")
    if page:
        say(f"chat in a browser at {page}")
