"""A client that calls an ASGI application in this process, and may leave in the middle."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvchat.server.guard import App, Message


@dataclass(slots=True)
class Got:
    """What a request got: its status, headers by lower-case name, and body."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str | None, Any]]:
        """The name and data of each server-sent event; data that is not JSON stays text."""
        found: list[tuple[str | None, Any]] = []
        for block in self.body.decode().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
            if "data" in lines:
                data = lines["data"]
                value = json.loads(data) if data.startswith("{") else data
                found.append((lines.get("event"), value))
        return found


async def call(
    app: App,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    leaves_after: Callable[[Got], bool] = lambda got: False,
) -> Got:
    """Send one request; the client goes as soon as `leaves_after` is true of what it got."""
    got, gone = Got(), asyncio.Event()
    given = [{"type": "http.request", "body": body, "more_body": False}]
    sent = {"host": "localhost", **(headers or {})}
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }

    async def receive() -> Message:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            got.status = message["status"]
            got.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            got.body += message.get("body", b"")
        if leaves_after(got):
            gone.set()

    if leaves_after(got):
        gone.set()
    await app(scope, receive, send)
    return got


def post(app: App, path: str, body: object, **headers: str) -> Got:
    """Send a JSON body and wait for the whole response."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(call(app, "POST", path, data, headers))


def get(app: App, path: str, **headers: str) -> Got:
    return asyncio.run(call(app, "GET", path, headers=headers))
