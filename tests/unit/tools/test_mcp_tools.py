"""MCP servers: real ones over stdio and HTTP, and what a file of servers may say.

The servers are made with the official package in a process of their own.
"""

import asyncio
import io
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvchat.chat.tools import ToolCall
from kvchat.core.errors import UsageError
from kvchat.tools.mcp_tools import McpServers, McpTool, ServerConfig, read_servers
from kvchat.tools.toolbox import Toolbox
from support.http_servers import serving

_SERVER = """
import sys
from mcp.server import MCPServer

server = MCPServer("calculator")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def environment(name: str) -> str:
    "Return a variable."
    import os
    return os.environ.get(name, "none")

@server.tool()
def wait() -> str:
    "Wait for ever."
    import time
    time.sleep(1000)
    return "never"

print("a server may write here", file=sys.stderr)
if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "server.py"
    path.write_text(_SERVER)
    return path


def connected(tmp_path: Path, servers: dict[str, Any]) -> tuple[McpServers, Toolbox]:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    made = McpServers(read_servers(path))
    toolbox = Toolbox((), late=made)
    toolbox.complete()
    return made, toolbox


@pytest.fixture
def over_stdio(program: Path, tmp_path: Path) -> Iterator[tuple[McpServers, Toolbox]]:
    server = {"command": sys.executable, "args": [str(program)], "env": {"GIVEN": "yes"}}
    made, toolbox = connected(tmp_path, {"calc": server, "gone": {"command": "/no/such/program"}})
    yield made, toolbox
    made.close()


def call(toolbox: Toolbox, name: str, /, **arguments: Any) -> str:
    return toolbox.run(ToolCall(name, arguments), threading.Event()).text


def test_a_server_is_used_and_another_that_is_not_there_is_told(over_stdio):
    _, toolbox = over_stdio

    assert [tool.name for tool in toolbox.tools] == ["calc__add", "calc__environment", "calc__wait"]
    assert toolbox.tools[0].description == "Add two numbers."
    assert toolbox.definitions.unquoted_value("calc__environment", "name", "1") == "1"
    [problem] = toolbox.problems
    reason = "cannot be started: /no/such/program: No such file or directory"
    assert problem == f"The MCP server gone {reason}."
    assert call(toolbox, "calc__add", a=2, b=3) == "5"
    assert call(toolbox, "calc__environment", name="GIVEN") == "yes"
    assert call(toolbox, "calc__add", a="x").startswith("Error: ")


def test_a_call_that_waits_ends_when_the_user_stops_it(over_stdio):
    _, toolbox = over_stdio
    stop = threading.Event()
    stop.set()

    assert toolbox.run(ToolCall("calc__wait", {}), stop).text == "Error: the user stopped it."


def test_the_servers_end_with_the_chat(over_stdio: tuple[McpServers, Toolbox]) -> None:
    servers, toolbox = over_stdio
    servers.close()
    servers.close()

    assert call(toolbox, "calc__add", a=1, b=1).startswith("Error: ")


def test_a_server_that_does_not_start_keeps_nothing_waiting(tmp_path: Path) -> None:
    """The first prompt waited for all servers, up to 30 s for one that says nothing."""
    path = tmp_path / "mcp.json"
    silent = {"command": sys.executable, "args": ["-c", "import time; time.sleep(600)"]}
    path.write_text(json.dumps({"mcpServers": {"silent": silent}}))
    toolbox = Toolbox((), late=McpServers(read_servers(path)))
    is_told = threading.Event()
    toolbox.when_complete(is_told.set)

    assert not toolbox.is_complete
    assert not is_told.is_set()
    toolbox.close()
    assert is_told.wait(25.0)  # a server has 30 s to start
    toolbox.complete()
    assert toolbox.tools == []


def test_a_server_over_http_is_used(program: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(program), str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(port)
        made, toolbox = connected(tmp_path, {"web": {"url": f"http://127.0.0.1:{port}/mcp"}})
        assert toolbox.problems == ()
        assert call(toolbox, "web__add", a=2, b=3) == "5"
        made.close()
    finally:
        process.kill()
        process.wait()


class _Site(ThreadingHTTPServer):
    """A server that speaks the protocol by hand, and may send its clients elsewhere first."""

    def __init__(self, moved: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.moved = moved  # where it sends requests for /mcp, if anywhere
        self.keys: list[str | None] = []  # of the requests that it answered
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Site

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.moved and self.path == "/mcp":
            self._send(307, b"", Location=self.server.moved)
            return
        self.server.keys.append(self.headers["X-Key"])
        if "id" not in asked:
            self._send(202, b"")
            return
        version = asked.get("params", {}).get("protocolVersion", "2025-06-18")
        info = {"serverInfo": {"name": "s", "version": "1"}, "capabilities": {"tools": {}}}
        tools = [{"name": "add", "inputSchema": {"type": "object", "properties": {}}}]
        result: dict[str, Any] = {"initialize": {"protocolVersion": version, **info}}.get(
            asked["method"], {"tools": tools}
        )
        answer = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode()
        self._send(200, answer, **{"Content-Type": "application/json"})

    def do_GET(self) -> None:
        self._send(405, b"")

    do_DELETE = do_GET

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_keys_follow_no_redirect_to_another_server(tmp_path: Path, is_elsewhere: bool) -> None:
    """Python's HTTP client leaves out `Authorization` only, and the call goes along. Within the
    server a redirect is followed, as many send /mcp to /mcp/.
    """
    other = _Site()
    site = _Site(f"{other.url}/mcp" if is_elsewhere else "/mcp/")
    with serving(other), serving(site):
        given = {"url": f"{site.url}/mcp", "headers": {"X-Key": "secret"}}
        made, toolbox = connected(tmp_path, {"web": given})
        made.close()

    assert other.keys == []
    if is_elsewhere:
        assert toolbox.tools == []
        assert "edirect" in toolbox.problems[0]
    else:
        assert [tool.name for tool in toolbox.tools] == ["web__add"]
        assert set(site.keys) == {"secret"}


def _wait_for_port(port: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        threading.Event().wait(0.05)
    raise AssertionError("the server did not start")


def test_variables_of_the_environment_are_filled_in(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    path = tmp_path / "mcp.json"
    server = {"url": "https://x.org", "headers": {"Authorization": "Bearer ${A_KEY}"}}
    path.write_text(json.dumps({"mcpServers": {"my server!": server}}))

    [config] = read_servers(path)

    assert config.name == "my_server_"
    assert config.headers == {"Authorization": "Bearer secret"}


BAD = (
    "{",
    "[]",
    '{"servers": {}}',
    '{"mcpServers": {"a": 1}}',
    '{"mcpServers": {"a": {}}}',
    '{"mcpServers": {"a": {"command": "x", "args": "y"}}}',
    '{"mcpServers": {"a": {"command": "x", "args": [{}]}}}',
    '{"mcpServers": {"a": {"command": ["x"]}}}',
    '{"mcpServers": {"a": {"command": "x", "url": "y"}}}',
    '{"mcpServers": {"a": {"command": "x", "env": ["a"]}}}',
    '{"mcpServers": {"a": {"command": "x", "env": {"a": []}}}}',
)


@pytest.mark.parametrize("content", BAD)
def test_a_bad_file_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(content)

    with pytest.raises(UsageError, match=r"mcp\.json"):
        read_servers(path)


def test_no_file_is_no_server(tmp_path: Path) -> None:
    assert read_servers(tmp_path / "mcp.json") == []


def servers_of(tmp_path: Path, servers: dict[str, Any]) -> list[ServerConfig]:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return read_servers(path)


def test_a_server_that_is_switched_off_is_not_started(tmp_path: Path) -> None:
    """Its command was run all the same."""
    off = [{"disabled": True}, {"enabled": False}, {"disabled": "true"}]
    on: list[dict[str, Any]] = [{}, {"disabled": False}, {"disabled": None}, {"enabled": True}]
    servers = {f"s{n}": {"command": "x", **state} for n, state in enumerate([*off, *on])}

    assert [config.name for config in servers_of(tmp_path, servers)] == ["s3", "s4", "s5", "s6"]


def test_what_other_clients_write_is_read(tmp_path: Path) -> None:
    env = {"PORT": 8080, "DEBUG": True, "RATE": 0.5, "NOT_SET": None}
    servers = {"s": {"command": "x", "args": None, "env": env, "cwd": None, "url": None}}
    numbers = {"n": {"command": "x", "args": ["--port", 80], "env": None, "headers": None}}

    [config, other] = servers_of(tmp_path, servers | numbers)

    assert config.env == {"PORT": "8080", "DEBUG": "true", "RATE": "0.5"}
    assert (config.args, other.args) == ((), ("--port", "80"))


def content(kind: str, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(type=kind, **fields)


_WORDS = content("text", text="words")
_LINK = content(
    "resource_link", uri="file:///a.txt", name="a.txt", title=None, description="A text"
)
RESULTS: dict[str, tuple[list[SimpleNamespace], Any, str]] = {
    "structured only": ([], {"answer": 42}, '{"answer": 42}'),
    "an empty text beside it": ([content("text", text="")], {"answer": 42}, '{"answer": 42}'),
    "an empty list": ([], {"result": []}, '{"result": []}'),
    "words beside it": ([_WORDS], {"answer": 42}, 'words\n{"answer": 42}'),
    "the same as text": ([content("text", text='{"a":1}')], {"a": 1}, '{"a":1}'),
    "its value as text": ([content("text", text="5")], {"result": 5}, "5"),
    "its text": ([_WORDS], {"result": "words"}, "words"),
    "its items": (
        [content("text", text="1"), content("text", text="b")],
        {"result": [1, "b"]},
        "1\nb",
    ),
    "an image beside it": (
        [content("image")],
        {"a": 1},
        '[image that cannot be shown as text]\n{"a": 1}',
    ),
    "a link": ([_LINK], None, "file:///a.txt - a.txt - A text"),
    "bytes": (
        [content("resource", resource=SimpleNamespace(uri="x://y", blob="AA=="))],
        None,
        "[resource at x://y that cannot be shown as text]",
    ),
    "nothing": ([], None, ""),
}


class Session:
    """A session whose server always returns one result."""

    def __init__(self, result: Any) -> None:
        self._result = result

    async def call_tool(self, *_: Any, **__: Any) -> Any:
        return self._result


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_all_that_a_result_says_is_read(loop, name, is_error):
    """Structured results without a text were read as nothing."""
    parts, structured, expected = RESULTS[name]
    result = SimpleNamespace(content=parts, structured_content=structured, is_error=is_error)
    definition = SimpleNamespace(name="t", description="", input_schema={})
    session: Any = Session(result)
    tool = McpTool("s", definition, session, loop)

    text = Toolbox([tool]).run(ToolCall("s__t", {}), threading.Event()).text

    plain = expected or ("the tool says no more than that." if is_error else "(nothing)")
    assert text == (f"Error: {plain}" if is_error else plain)


_FAILING = """
import sys
print("loading", file=sys.stderr)
print("Error: A_KEY is not set", file=sys.stderr)
sys.exit(1)
"""


def test_the_last_words_of_a_server_that_fails_are_told_and_logged(tmp_path, caplog):
    """It said "Connection closed"."""
    failing = {"command": sys.executable, "args": ["-c", _FAILING]}
    made, toolbox = connected(tmp_path, {"s": failing})
    made.close()

    [problem] = toolbox.problems
    assert problem.startswith("The MCP server s does not answer: Connection closed")
    assert problem.endswith("; its last words: loading / Error: A_KEY is not set.")
    assert "A_KEY is not set" in caplog.text


_JUNK = """
import json, sys
print("Welcome to my server!", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print("debug: secret words", flush=True)
    if asked["method"] == "tools/call":
        print("out of memory", file=sys.stderr)
        sys.exit(1)
    answer = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
              "serverInfo": {"name": "x", "version": "1"},
              "tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer}), flush=True)
"""


def test_other_lines_on_stdout_print_nothing_and_an_end_has_its_words(tmp_path, capfd, monkeypatch):
    """The library prints a traceback for each such line."""
    log = io.StringIO()
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(log)])
    made, toolbox = connected(tmp_path, {"s": {"command": sys.executable, "args": ["-c", _JUNK]}})
    text = call(toolbox, "s__t")
    made.close()

    assert toolbox.problems == ()
    assert text == "Error: its server has ended (Connection closed); its last words: out of memory."
    assert "the MCP library: Failed to parse" in log.getvalue()
    printed = capfd.readouterr().err + log.getvalue()
    assert not any(word in printed for word in ("Traceback", "secret words", "out of memory"))
