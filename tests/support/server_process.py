"""ServerProcess: a `kvchat serve` that runs, for the clients that call it."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.commands import Shell
from support.fork_server import ForkedLife

_PATIENCE_S = 180


class ServerProcess:
    """A running server. `url` has no path."""

    def __init__(self, process: "subprocess.Popen[bytes] | ForkedLife", port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def fetch(self, path: str, body: object = None) -> Any:
        """Return the JSON that answers a GET, or a POST with a body."""
        with self._open(path, body) as got:
            return json.load(got)

    def stream(self, path: str, body: object) -> list[Any]:
        """Return the JSON objects of a streamed answer, without the mark of its end."""
        with self._open(path, body) as got:
            lines = [line[5:].strip() for line in got if line.startswith(b"data:")]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def num_generated(self) -> int:
        """Return how many tokens of answers the server has generated."""
        with self._open("/metrics", None) as got:
            lines = dict(line.rsplit(maxsplit=1) for line in got.read().decode().splitlines())
        return int(lines["kvchat_generated_tokens_total"])

    def _open(self, path: str, body: object) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        return urllib.request.urlopen(self.url + path, data, _PATIENCE_S)

    def wait_until_ready(self) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            try:
                self.fetch("/health")
                return
            except (urllib.error.URLError, ConnectionError):  # refused, or 503 while it loads
                assert self.process.poll() is None, self.process.communicate()
                time.sleep(0.1)
        raise AssertionError("the server is not ready")


@contextmanager
def served(shell: Shell, *arguments: str) -> Iterator[ServerProcess]:
    """Yield a server that is ready; it is killed with SIGKILL at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with shell.start("serve", "--no-api-key", *arguments, "--port", str(port)) as process:
        try:
            server = ServerProcess(process, port)
            server.wait_until_ready()
            yield server
        finally:
            process.kill()
