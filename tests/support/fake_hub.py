"""A Hugging Face hub on this machine: serves the files of one repository, and lists requests."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants as hub_constants

from support.http_servers import serving

_REVISION = "1" * 40


def _sibling(name: str, content: bytes) -> dict[str, Any]:
    """Return a file as the hub describes it: large ones by SHA-256, small ones by git's hash."""
    whole, head = hashlib.sha256(content).hexdigest(), f"blob {len(content)}\0".encode()
    lfs = {"size": len(content), "sha256": whole, "pointerSize": 1}
    told = {"rfilename": name, "size": len(content)}
    told["blobId"] = hashlib.sha1(head + content).hexdigest()
    return {**told, "lfs": lfs} if name.endswith((".gguf", ".safetensors")) else told


@dataclass
class FakeHub:
    """The repository `name` with its files' contents by path; `downloaded` are the paths asked for.

    address   where it listens, once it runs
    sent      what is sent in place of a file's content, by path
    cuts      bytes of a file after which each of the next connections breaks
    refusal   the status and the code of the hub's error for every request; None for none
    """

    name: str
    files: dict[str, bytes]
    address: str = ""
    downloaded: list[str] = field(default_factory=list)
    sent: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    refusal: tuple[int, str] | None = None

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body for a path of the hub's interface."""
        path = path.partition("?")[0]
        if self.refusal is not None:
            return self.refusal[0], {"X-Error-Code": self.refusal[1]}, b""
        if path.startswith(f"/api/models/{self.name}"):
            return 200, {}, json.dumps(self._described(path)).encode()
        head = f"/{self.name}/resolve/"
        place = path.removeprefix(head).partition("/")[2] if path.startswith(head) else ""
        if place not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound" if place else "RepoNotFound"}, b""
        content = self.files[place]
        mark = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{mark}"', "X-Repo-Commit": _REVISION, "Accept-Ranges": "bytes"}
        return 200, headers, self.sent.get(place, content)

    def _described(self, path: str) -> Any:
        if "/tree/" in path:
            return [
                {"type": "file", "path": p, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for p, c in self.files.items()
            ]
        siblings = [_sibling(name, content) for name, content in self.files.items()]
        return {"id": self.name, "modelId": self.name, "sha": _REVISION, "siblings": siblings}

    @contextmanager
    def instead_of(self, patch: pytest.MonkeyPatch, cache: Path) -> Iterator["FakeHub"]:
        """Have huggingface_hub ask this hub in this context, and keep its files in `cache`."""
        with serving(ThreadingHTTPServer(("127.0.0.1", 0), self._handler())) as self.address:
            template = f"{self.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            patch.setattr(hub_constants, "ENDPOINT", self.address)
            patch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            patch.setattr(hub_constants, "HF_HUB_CACHE", str(cache))
            patch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
            yield self

    def _handler(self) -> type[BaseHTTPRequestHandler]:
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
                first = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
                if with_body and first and status == 200:
                    headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
                    status, body = 206, body[first:]
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body and hub.cuts and "/resolve/" in self.path:
                    self.wfile.write(body[: hub.cuts.pop(0)])
                    self.close_connection = True
                elif with_body:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
