"""A Hugging Face hub on this machine: serves the files of one repository, and lists requests."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

_REVISION = "1" * 40


@dataclass
class FakeHub:
    """The repository `name` with its files' contents by path; `downloaded` are the paths asked for.

    `address` is where it listens, once it runs.
    """

    name: str
    files: dict[str, bytes]
    address: str = ""
    downloaded: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body for a path of the hub's interface."""
        path = path.partition("?")[0]
        if path.startswith(f"/api/models/{self.name}"):
            return 200, {}, json.dumps(self._described(path)).encode()
        head = f"/{self.name}/resolve/"
        place = path.removeprefix(head).partition("/")[2] if path.startswith(head) else ""
        if place not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound" if place else "RepoNotFound"}, b""
        content = self.files[place]
        mark = hashlib.sha256(content).hexdigest()
        return 200, {"ETag": f'"{mark}"', "X-Repo-Commit": _REVISION}, content

    def _described(self, path: str) -> Any:
        if "/tree/" in path:
            return [
                {"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for p, c in self.files.items()
            ]
        siblings = [{"rfilename": name} for name in self.files]
        return {"id": self.name, "modelId": self.name, "sha": _REVISION, "siblings": siblings}

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Listen on a free port of this machine inside this context."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._send(with_body=False)

            def do_GET(self) -> None:
                self._send(with_body=True)

            def _send(self, with_body: bool) -> None:
                status, headers, body = hub.answer(self.path)
                if with_body and "/resolve/" in self.path:
                    hub.downloaded.append(self.path.partition("/resolve/")[2].partition("/")[2])
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
