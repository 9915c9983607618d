"""--endpoint: opens another program's server as the engine of a chat.

The configuration may name servers:

    [endpoints.work]
    url = "https://llm.example.org"
    model = "qwen3-32b"
    key_variable = "WORK_LLM_KEY"

The key comes from the environment variable that is named there, from KVCHAT_ENDPOINT_KEY, or from
the system's keyring where the package `keyring` is installed.
"""

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.chat.template import NewTurn
from kvchat.cli.settings import ENDPOINT_KEY_VARIABLE, ENDPOINTS, Settings
from kvchat.core.errors import KvchatError, ModelError, UsageError
from kvchat.core.events import LoadEvent, LoadProgress, ModelReady
from kvchat.core.text import one_line, shown
from kvchat.core.toml_text import read_table
from kvchat.core.types import Health

if TYPE_CHECKING:
    from kvchat.chat.chat_model import ChatModel
    from kvchat.chat.host import ChatHost
    from kvchat.chat.served_text import Ask
    from kvchat.chat.store import SessionStore
    from kvchat.cli.running_server import RunningServer
    from kvchat.engine.thread import Build, DrivenEngine
    from kvchat.remote.address import Address
    from kvchat.remote.engine import RemoteEngine, Spell
    from kvchat.remote.kinds import Server

_FIELDS = frozenset({"url", "model", "key_variable"})
# Texts in which tokenizers differ: cases, digits, white space, scripts, code, control tokens.
_SAMPLES = (
    "Hello, World! It's 1234567 o'clock -- isn't it?\n\n\tdef f(x):  return x**2  # naïve\n",
    "Größe 日本語 Привет مرحبا 🙂🙃 e\u0301 \u00a0end  ",
)
_TEXT_PATH = "/kvchat/text"
_log = logging.getLogger(__name__)


def endpoint_address(given: str, model: str, config_path: Path) -> "Address":
    """Return the server that `--endpoint` means: a name in the configuration, or an address.

    `model` is the model to ask for, "" if the user named none. Raises UsageError.
    """
    from kvchat.remote.address import address_of

    entry = _named(given, config_path)
    if entry is None:
        return address_of(given, _key("", given), model)
    url, variable = entry.get("url", ""), entry.get("key_variable", "")
    if not url:
        raise UsageError(f"{config_path} gives the endpoint {shown(given)} no url.")
    return address_of(url, _key(variable, url), model or entry.get("model", ""))


def _named(name: str, config_path: Path) -> dict[str, str] | None:
    """Return what the configuration says of a name; None for an address that it does not have."""
    entries = read_table(config_path).get(ENDPOINTS, {})
    if not isinstance(entries, dict):
        raise UsageError(f"endpoints in {config_path} must be a table of tables.")
    entry = entries.get(name)
    if entry is None:
        if entries and not set(name) & set(".:/") and name != "localhost":
            raise UsageError(
                f"{config_path} has no endpoint {shown(name)}.",
                f"It has {', '.join(one_line(str(known), 40) for known in entries)}.",
            )
        return None
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise UsageError(f"The endpoint {shown(name)} in {config_path} must be a table of texts.")
    if unknown := sorted(set(entry) - _FIELDS):
        raise UsageError(
            f"The endpoint {shown(name)} in {config_path} sets {shown(unknown[0])}.",
            f"There are {', '.join(sorted(_FIELDS))}.",
        )
    return entry


def _key(variable: str, url: str) -> str:
    if variable:
        if not (key := os.environ.get(variable, "")):
            raise UsageError(f"The key of the endpoint is missing: {variable} is not set.")
        return key
    if key := os.environ.get(ENDPOINT_KEY_VARIABLE, ""):
        return key
    if importlib.util.find_spec("keyring") is None:
        return ""
    try:
        return importlib.import_module("keyring").get_password("kvchat", url) or ""
    except Exception as error:  # each system's keyring has errors of its own
        _log.warning("the keyring cannot be read", exc_info=error)
        return ""


def open_remote_host(
    settings: Settings,
    address: "Address",
    store: "SessionStore | None",
    on_load: Callable[[LoadEvent], None] | None,
) -> "ChatHost":
    """Return a host whose engine is the server at an address; raises ModelError if none answers."""
    from kvchat.chat.host import ChatHost
    from kvchat.remote.servers import find_server

    server = find_server(address, settings["timeout"])
    model = _own_tokenizer(server, settings["timeout"])
    spell = _spelling(model) if model is not None else None
    if model is None:
        from kvchat.chat.message_model import message_model

        model = message_model(server.model or server.kind, server.max_context)
    of_model = settings.of_model(model.name)
    return ChatHost(model, _build(server, spell), store, on_load, settings=of_model)


def open_attached_host(
    settings: Settings,
    find: "Callable[[], RunningServer | None]",
    store: "SessionStore | None",
    on_load: Callable[[LoadEvent], None] | None,
    load: "Build",
    read_own: "Callable[[], ChatModel]",
) -> "ChatHost | None":
    """Return a host for a `kvchat serve` that the user did not name, None if `find` finds none.

    The server encodes and decodes for the chat. Raises ModelError if it does not, or does not
    answer. If it ends or computes nothing any more, the chat goes on with the server that `find`
    finds then, or with the model that `load` loads, whose text side `read_own` reads.
    """
    from kvchat.chat.host import ChatHost
    from kvchat.chat.served_text import TextQuestions, served_model

    running = find()
    if running is None:
        return None
    server, facts, ask = _answering_server(running.address)
    digest = server.tokenizer

    def find_text() -> "Ask | None":
        again = find()
        with suppress(ModelError):  # as if there were none
            if again is not None and (found := _answering_server(again.address)):
                return found[2] if found[0].tokenizer == digest else None
        return None

    try:
        model = served_model(server.files, facts, TextQuestions(ask, find_text, read_own))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError("The server that runs here is of another version.") from error
    spell = _spelling(model)

    def rebuild(progress: Callable[[LoadProgress], None]) -> "tuple[DrivenEngine, ModelReady]":
        again = find()
        with suppress(ModelError):  # as if there were none
            server = _answering_server(again.address)[0] if again is not None else None
            if again is not None and server is not None and server.tokenizer == digest:
                return _build(server, spell, again.has_ended)(progress)
        return load(progress)

    build = _build(server, spell, running.has_ended)
    began_s = running.began_s
    of_model = settings.of_model(model.name)
    return ChatHost(
        model, build, store, on_load, rebuild=rebuild, began_s=began_s, settings=of_model
    )


def _answering_server(address: "Address") -> "tuple[Server, dict[str, Any], Ask]":
    """Return the kvchat server at an address, the facts of its model's text, and how to ask it.

    Raises ModelError if it does not answer, or cannot.
    """
    from kvchat.remote.kinds import LARGE_CONTEXT, Kind, Server
    from kvchat.remote.questions import Questions

    questions = Questions(address)
    try:
        status, told = questions.ask(_TEXT_PATH)
    except OSError as error:
        raise ModelError("The server that runs here does not answer.") from error
    facts, context = told.get("text"), told.get("context_length")
    if status != HTTPStatus.OK or not isinstance(facts, dict):
        raise ModelError("The server that runs here is of another version, or takes another key.")
    if told.get("status") in (Health.STALLED, Health.FAILED):
        raise ModelError("The server that runs here computes nothing any more.", "Restart it.")

    def ask(name: str, given: Mapping[str, Any]) -> Any:
        status, told = questions.ask(_TEXT_PATH, {"question": name, "given": given})
        if "failed" in told:
            raise ModelError(str(told["failed"]), str(told.get("hint", "")))
        if status != HTTPStatus.OK or "answer" not in told:
            raise OSError(f"the server refused a question with HTTP status {status}")
        return told["answer"]

    model, files = str(told.get("model", "")), str(told.get("files", ""))
    limit = context if isinstance(context, int) and context > 0 else LARGE_CONTEXT
    digest = str(facts.get("digest", ""))
    device = str(told.get("device", ""))
    server = Server(address, Kind.KVCHAT, model, files, digest, max_context=limit, device=device)
    return server, facts, ask


def _build(
    server: "Server", spell: "Spell | None", has_ended: Callable[[], bool] | None = None
) -> "Build":
    """Return what builds the engine of a server; `RemoteEngine` explains `spell`, `has_ended`."""
    address = server.address

    def build(progress: Callable[[LoadProgress], None]) -> "tuple[RemoteEngine, ModelReady]":
        from kvchat.remote.engine import RemoteEngine

        place = f"{server.kind} {'on' if address.socket else 'at'} {address.shown}"
        ready = ModelReady(
            name=server.model or server.kind,
            identity=place,
            device=f"{place} on {server.device}" if server.device else place,
            dtype="",
            context_limit=server.max_context,
            load_s=0.0,
            notes=_notes(server),
            is_context_limit_told=server.knows_context,
            sent_as="token ids" if spell is not None else "messages",
        )
        return RemoteEngine(server, spell, has_ended), ready

    return build


def _spelling(model: "ChatModel") -> "Spell":
    from kvchat.chat.text_codec import Segment

    def spell(last_id: int, text: str) -> list[int]:
        return model.tokenizer.encode_after(last_id, [Segment(text, is_inert=True)])

    return spell


def _notes(server: "Server") -> tuple[str, ...]:
    address = server.address
    is_open = address.key and address.url.startswith("http:") and not address.is_here
    return (f"The key goes to {address.shown} unencrypted.",) if is_open else ()


def _own_tokenizer(server: "Server", limit_s: float | None) -> "ChatModel | None":
    """Return the text side of the server's model, if its files are here and it takes their ids.

    The server has to encode two texts, and the template's own tokens, to the same ids.
    """
    from kvchat.chat.chat_model import read_chat_model
    from kvchat.model.checkpoint.source import DEMO, find_model

    is_here = server.files == DEMO or Path(server.files).is_absolute()
    if not (server.may_take_ids and is_here):
        return None
    try:
        model = read_chat_model(find_model(server.files), limit_s=limit_s)
    except KvchatError as error:
        _log.info("the server's model is not read here: %s", type(error).__name__)
        return None
    return model if _is_same(server, model) else None


def _is_same(server: "Server", model: "ChatModel") -> bool:
    from datetime import datetime

    from kvchat.chat.text_codec import Segment
    from kvchat.remote.kinds import Kind
    from kvchat.remote.servers import Asker

    if server.kind is Kind.KVCHAT:
        return server.tokenizer == model.tokenizer.digest
    template = model.tokenizer.decode(model.format.opening(NewTurn("x", datetime(2026, 1, 2))))
    try:
        with Asker(server.address) as asker:
            for text, is_inert in (*((s, True) for s in _SAMPLES), (template, False)):
                own = model.tokenizer.encode([Segment(text, is_inert)])
                if asker.tokens(server, text, not is_inert) != own:
                    return False
    except ModelError:
        return False
    return True
