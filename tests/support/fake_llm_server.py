"""FakeServer: a real HTTP server on this machine that says what a test lets it say."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.http_servers import serving


@dataclass(frozen=True)
class Asked:
    """One request that the server got."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Refusal:
    """An answer with another status than 200."""

    status: int
    content: object
    headers: tuple[tuple[str, str], ...] = ()


class BrokenOff(Exception):
    """Raised by an author to close the connection in the middle of an answer."""


# Says what to answer to a body sent to a path: JSON objects and lines that are streamed, or one
# JSON value, or a Refusal.
Author = Callable[[str, Any], object]


@dataclass
class FakeServer:
    """What runs, and what it was asked. `gets` are the answers to GET requests, by path.

    `is_abandoned` is set when a client goes before its answer is complete. While `is_awake` is not
    set, requests are taken and not answered.
    """

    gets: dict[str, object]
    author: Author
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    is_abandoned: threading.Event = field(default_factory=threading.Event)
    is_awake: threading.Event = field(default_factory=threading.Event)
    stop: Callable[[], None] = lambda: None

    @property
    def bodies(self) -> list[Any]:
        """The bodies of the requests for answers."""
        return [asked.body for asked in self.asked if isinstance(asked.body, dict)]


@contextmanager
def fake_server(
    author: Author, gets: dict[str, object] | None = None, port: int = 0
) -> Iterator[FakeServer]:
    server = FakeServer(
        gets if gets is not None else {"/v1/models": models("m", "someone")}, author
    )
    server.is_awake.set()
    http = ThreadingHTTPServer(("127.0.0.1", port), _handler(server))
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def stop() -> None:
        server.is_awake.set()
        http.shutdown()
        http.server_close()
        thread.join()

    server.stop = stop
    try:
        yield server
    finally:
        stop()


@contextmanager
def raw_server(pieces: Callable[[], Iterable[bytes]]) -> Iterator[str]:
    """Yield the address of a server that answers every request with the same bytes, and hangs up.

    The bytes are a whole HTTP response, or something that only looks like one.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            try:
                for piece in pieces():
                    self.wfile.write(piece)
            except OSError:
                return  # the client has heard enough

    tcp = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    tcp.daemon_threads = True
    tcp.block_on_close = False
    with serving(tcp) as url:
        yield url


def models(name: str, owner: str, **others: object) -> dict[str, object]:
    """Return the list of a server with one model."""
    return {"data": [{"id": name, "owned_by": owner, **others}]}


def chunks(*texts: str, finish: str = "stop", usage: object = None) -> list[object]:
    """Return the stream of an answer in OpenAI's chat form."""
    said: list[object] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    said.append({"choices": [{"delta": {}, "finish_reason": finish}]})
    if usage is not None:
        said.append({"choices": [], "usage": usage})
    return [*said, "[DONE]"]


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(Asked(self.path, dict(self.headers), None))
            server.is_awake.wait()
            found = server.gets.get(self.path, Refusal(404, {"error": "no such path"}))
            self._send(found, is_stream=isinstance(found, Iterator))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(Asked(self.path, dict(self.headers), body))
            server.is_awake.wait()
            found = server.author(self.path, body)
            self._send(found, is_stream=isinstance(found, list | Iterator))

        def _send(self, found: object, is_stream: bool) -> None:
            status = found.status if isinstance(found, Refusal) else 200
            content = found.content if isinstance(found, Refusal) else found
            try:
                self.send_response(status)
                self.send_header("Connection", "close")
                for name, value in found.headers if isinstance(found, Refusal) else ():
                    self.send_header(name, value)
                self.end_headers()
                if is_stream and isinstance(content, Iterable):
                    self._stream(content)
                else:
                    self.wfile.write(json.dumps(content).encode())
            except OSError:
                server.is_abandoned.set()
            except BrokenOff:
                return

        def _stream(self, content: Iterable[object]) -> None:
            for item in content:
                text = item if isinstance(item, str) else json.dumps(item)
                self.wfile.write(f"data: {text}\n\n".encode())
                self.wfile.flush()

        def log_message(self, format: str, *arguments: object) -> None:
            """Write nothing."""

    return Handler
