"""McpServers: the tools of MCP servers, which other programs offer over stdio or HTTP.

The official `mcp` package speaks the protocol, on an event loop of its own thread. Servers are
named in a file in the form that other clients know: an object `mcpServers`, by name either
`command`, `args`, `env` and `cwd`, or `url` and `headers`.
"""

import asyncio
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvchat.core.errors import UsageError
from kvchat.core.paths import read_bounded
from kvchat.core.text import one_line, read_json_text
from kvchat.tools.run_command import PipeReader
from kvchat.tools.toolbox import Tool, ToolFailed

if TYPE_CHECKING:
    from mcp import ClientSession

_SHOWN_BYTES = 4096
_MOST_LINES = 3
_MOST_CHARS = 300
_LIBRARY = "mcp"
_log = logging.getLogger(__name__)


class ServerErrors:
    """The end of what a server writes on stderr, which `file` takes."""

    def __init__(self) -> None:
        descriptor, written = os.pipe()
        self.file = os.fdopen(written, "w")
        self._reader = PipeReader(descriptor, 0, _SHOWN_BYTES)

    def close(self) -> None:
        """Leave the file to the server. Idempotent."""
        self.file.close()

    def in_words(self, wait_s: float = 0.5) -> str:
        """Return the last lines as the end of a sentence, "" without any; waits for the end."""
        text = self._reader.text(wait_s).rpartition("bytes left out]\n")[2]
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        said = one_line(" / ".join(lines[-_MOST_LINES:])[-_MOST_CHARS:], _MOST_CHARS)
        return f"; its last words: {said}" if said else ""


class _Quiet(logging.Handler):
    """Logs what the library complains of, without what the server wrote: it may be conversation."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.warning("the MCP library: %s", one_line(str(record.msg)))


def keep_library_quiet() -> None:
    """Let the library's warnings go to kvchat's log only; Python would print them. Idempotent."""
    logger = logging.getLogger(_LIBRARY)
    if not any(isinstance(handler, _Quiet) for handler in logger.handlers):
        logger.addHandler(_Quiet(logging.WARNING))
    logger.propagate = False


_MOST_BYTES = 1 << 20
_START_S = 30.0
_CALL_S = 120.0
_LOOK_S = 0.1
_MEND_IT = "Mend or remove it."
_NO_WORD = re.compile(r"[^A-Za-z0-9_-]")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
# What the library says where a server ends: in its message, or as the name of the error.
_CLOSED = ("Connection closed", "ClosedResourceError", "BrokenResourceError")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server: a command with its arguments, or else an address."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


def read_servers(path: Path) -> list[ServerConfig]:
    """Return the servers of a file, none if there is no file; raises UsageError."""
    try:
        document = json.loads(read_bounded(path, _MOST_BYTES))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", _MEND_IT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON.", _MEND_IT) from error
    servers = document.get("mcpServers") if isinstance(document, dict) else None
    if not isinstance(servers, dict):
        raise UsageError(f"{path} has no object mcpServers.", _MEND_IT)
    return [_server(name, value, path) for name, value in servers.items() if _is_on(value)]


def _is_on(value: Any) -> bool:
    """Whether a server is to be started; other clients know both switches."""
    if not isinstance(value, dict):
        return True  # and refused
    return not (_is_set(value.get("disabled")) or value.get("enabled") in (False, "false"))


def _is_set(switch: object) -> bool:
    return switch is True or switch == "true"


def _server(name: str, value: Any, path: Path) -> ServerConfig:
    try:
        if not isinstance(value, dict):
            raise TypeError
        # Where other clients write what is not there as null, it is not there.
        fields = {key: item for key, item in value.items() if item is not None}
        config = ServerConfig(
            _NO_WORD.sub("_", name),
            _text(fields.get("command", "")),
            tuple(_text(item) for item in _of(list, fields.get("args", []))),
            _texts(fields.get("env", {})),
            _text(fields["cwd"]) if fields.get("cwd") else None,
            _text(fields.get("url", "")),
            _texts(fields.get("headers", {})),
        )
    except TypeError:
        config = ServerConfig(name)
    if bool(config.command) is bool(config.url):
        raise UsageError(
            f"{path}: the server {one_line(name, 40)} needs a command or a url, and texts in both.",
            _MEND_IT,
        )
    return config


def _of(kind: type[_T], value: Any) -> _T:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _texts(values: Any) -> dict[str, str]:
    """Return the values by name as texts, without those that are null."""
    items = _of(dict, values).items()
    return {str(key): _text(item) for key, item in items if item is not None}


def _text(value: Any) -> str:
    """Return a text in which `${NAME}` is the environment's value; TypeError for no plain value.

    Numbers and truth values are texts as JSON has them: a port is often written so.
    """
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    text = _of(str, value)
    return _VARIABLE.sub(lambda match: os.environ.get(match[1], ""), text)


class McpServers:
    """Connections to servers, which start at once, on a thread of their own. `close` ends them.

    What a server writes on stderr is told if it fails. It is logged only if it fails at its start:
    later it may hold text of the conversation.
    """

    def __init__(self, configs: list[ServerConfig]) -> None:
        keep_library_quiet()
        self._configs = configs
        self._loop = asyncio.new_event_loop()
        self._tools: list[Tool] = []
        self._problems: list[str] = []
        self._started: Future[None] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kvchat-mcp", daemon=True)
        self._thread.start()

    def when_started(self, tell: Callable[[], None]) -> None:
        self._started.add_done_callback(lambda _: tell())

    def wait(self) -> tuple[list[Tool], tuple[str, ...]]:
        """Wait for all servers; return their tools in the order of the file, and problems."""
        self._started.result()
        return self._tools, tuple(self._problems)

    def close(self) -> None:
        """End all servers, also those that are starting. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(5.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Hold all connections. Each has its own task: one that breaks ends no other."""
        starts = [self._loop.create_future() for _ in self._configs]
        holding = [
            asyncio.create_task(self._hold(config, ready))
            for config, ready in zip(self._configs, starts, strict=True)
        ]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            all_ready = asyncio.gather(*starts)
            await asyncio.wait((all_ready, stopping), return_when=asyncio.FIRST_COMPLETED)
            if all_ready.done():
                self._tools = [tool for tools in all_ready.result() for tool in tools]
        finally:
            self._started.set_result(None)
        await stopping
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)

    async def _hold(self, config: ServerConfig, ready: "asyncio.Future[list[Tool]]") -> None:
        """Connect to one server, and keep the connection until this task is cancelled."""
        errors = ServerErrors()
        try:
            async with AsyncExitStack() as stack:
                stack.callback(errors.close)
                async with asyncio.timeout(_START_S):
                    session = await _connect(config, stack, errors)
                    tools = await _list_tools(session)
                errors.close()
                ready.set_result(
                    [McpTool(config.name, tool, session, self._loop, errors) for tool in tools]
                )
                await asyncio.Event().wait()
        except Exception as error:
            problem = _complaint(_root(error))
            if not ready.done():
                problem += await asyncio.to_thread(errors.in_words)
                self._problems.append(f"The MCP server {config.name} {problem}.")
                ready.set_result([])
            _log.warning("the MCP server %s %s", config.name, problem, exc_info=error)


def _complaint(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"does not answer within {_START_S:g} s"
    if isinstance(error, FileNotFoundError | PermissionError) and error.filename is not None:
        return f"cannot be started: {one_line(str(error.filename), 80)}: {error.strerror}"
    reason = one_line(str(error), 120).rstrip(".") or type(error).__name__
    return f"does not answer: {reason}"


def _root(error: BaseException) -> BaseException:
    """Return the first error of a group: the library's tasks wrap what really happened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _connect(
    config: ServerConfig, stack: AsyncExitStack, errors: ServerErrors
) -> "ClientSession":
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import get_default_environment, stdio_client

    if config.url:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(_START_S, read=_CALL_S)
        # A redirect would take the headers, and the keys in them, to another server. The package
        # follows those within the server by itself.
        client = httpx2.AsyncClient(
            headers=dict(config.headers), timeout=timeout, follow_redirects=False
        )
        await stack.enter_async_context(client)
        streams = await stack.enter_async_context(
            streamable_http_client(config.url, http_client=client)
        )
    else:
        parameters = StdioServerParameters(
            command=config.command,
            args=list(config.args),
            env={**get_default_environment(), **config.env},
            cwd=config.cwd,
        )
        streams = await stack.enter_async_context(stdio_client(parameters, errlog=errors.file))
    session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
    await session.initialize()
    return session


async def _list_tools(session: "ClientSession") -> list[Any]:
    """Return all tools of a server, which it lists in pages."""
    from mcp.types import PaginatedRequestParams

    tools: list[Any] = []
    cursor = None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


class McpTool:
    """One tool of a server, under the name `SERVER__TOOL`."""

    is_allowed_by_call = False

    def __init__(
        self,
        server: str,
        tool: Any,
        session: "ClientSession",
        loop: asyncio.AbstractEventLoop,
        errors: ServerErrors | None = None,
    ) -> None:
        self.name = f"{server}__{_NO_WORD.sub('_', tool.name)}"
        self.description = tool.description or ""
        self.parameters: Mapping[str, Any] = tool.input_schema
        self._name = tool.name
        self._session = session
        self._loop = loop
        self._errors = errors

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        if self._loop.is_closed():
            raise ToolFailed("its server has ended.")
        calling = asyncio.run_coroutine_threadsafe(self._call(dict(arguments)), self._loop)
        result = self._wait(calling, stop)
        text = _result_text(result)
        if result.is_error:
            raise ToolFailed(text or "the tool says no more than that.")
        return text

    async def _call(self, arguments: dict[str, Any]) -> Any:
        return await self._session.call_tool(self._name, arguments, read_timeout_seconds=_CALL_S)

    def _wait(self, future: "Future[Any]", stop: threading.Event) -> Any:
        while True:
            try:
                return future.result(_LOOK_S)
            except NotYet:
                if future.done():
                    raise ToolFailed("the server did not answer in time.") from None
                if stop.is_set():
                    future.cancel()
                    raise ToolFailed("the user stopped it.") from None
            except Exception as error:
                raise ToolFailed(self._why(_root(error))) from error

    def _why(self, error: BaseException) -> str:
        """Return why a call failed; of a server that has ended, with its last words."""
        reason = one_line(str(error), 200) or type(error).__name__
        if not any(word in reason for word in _CLOSED):
            return reason
        last_words = self._errors.in_words() if self._errors is not None else ""
        return f"its server has ended ({reason}){last_words}."


def _result_text(result: Any) -> str:
    """Return all that a result says.

    Most servers write what is structured as text too; where it is no part of the text, it is added.
    """
    texts = [text for part in result.content or () if (text := _part_text(part)).strip()]
    structured = getattr(result, "structured_content", None)
    if structured is not None and not _is_said(structured, texts):
        texts.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(texts)


def _is_said(structured: Any, texts: list[str]) -> bool:
    """Whether texts are a structured result: as JSON, as the value of `result`, or its items."""
    values = [_value(text) for text in texts]
    forms = [structured]
    if isinstance(structured, dict) and list(structured) == ["result"]:
        forms.append(structured["result"])
    contents = [*values, *texts, values, texts] if texts else []
    return any(form in contents for form in forms)


def _value(text: str) -> Any:
    try:
        return read_json_text(text)
    except (ValueError, RecursionError):
        return text


def _part_text(part: Any) -> str:
    """Return a part of a result as text; images and sounds are only named, links are addresses."""
    kind = getattr(part, "type", "") or "something"
    if kind == "text":
        return str(part.text)
    if kind == "resource_link":
        about = [getattr(part, name, None) for name in ("title", "name", "description")]
        return " - ".join([str(part.uri), *dict.fromkeys(str(one) for one in about if one)])
    resource = getattr(part, "resource", None)
    if resource is not None and getattr(resource, "text", None) is not None:
        return str(resource.text)
    address = getattr(resource, "uri", None)
    where = f" at {address}" if address else ""
    return f"[{kind}{where} that cannot be shown as text]"
