"""A shared store that is far away, slow or gone, over real connections: what a chat loses by it."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from kvchat.cache.shared.opening import open_store
from kvchat.cache.shared.store import Deadlines, SharedStore, StoreTrouble
from support.chains import compute_at
from support.far_proxy import FarProxy, far_from
from support.restarts import HISTORY, spec
from support.shared_machines import Machines
from support.shared_stores import valkey_server

_ROUND_TRIP_S = 0.06
GROUP, NAME = "group", "name"


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    with valkey_server() as url:
        port = urlsplit(url).port
        assert port is not None
        yield port


@pytest.fixture
def proxy(server_port: int) -> Iterator[FarProxy]:
    with far_from(server_port) as proxy:
        yield proxy


def store_at(proxy: FarProxy, first_s: float = 0.05, whole_s: float = 10.0) -> SharedStore:
    return open_store(f"valkey://127.0.0.1:{proxy.port}/0", Deadlines(first_s, whole_s))


def test_a_far_store_is_asked_only_where_that_costs_two_percent(proxy: FarProxy) -> None:
    proxy.delay_s = _ROUND_TRIP_S / 2
    machines = Machines(real=lambda: store_at(proxy, first_s=5.0))
    chat = machines.start()
    num_pieces = proxy.num_pieces

    compute_at(chat.chain, len(HISTORY) / 2.0)  # two seconds for all of it: 60 ms are 3 %
    chat.answer_rightly(spec(HISTORY))
    assert proxy.num_pieces == num_pieces

    compute_at(chat.chain, len(HISTORY) / 60.0)  # a minute: 0.1 %
    other = tuple(reversed(HISTORY))
    chat.answer_rightly(spec(other))
    assert proxy.num_pieces == num_pieces + 1  # one round trip for all blocks
    chat.end()


def test_a_pack_that_takes_longer_than_the_first_byte_goes_over_a_slow_line(proxy):
    """It failed where 4 MiB did not leave and arrive within the 50 ms of a first byte."""
    proxy.bytes_per_s, payload = 4e6, bytes(range(256)) * 4096
    store = store_at(proxy, first_s=0.1)

    store.put(GROUP, NAME, b"head", payload, 100)

    assert store.heads(GROUP, [NAME]) == {NAME: b"head"}
    assert store.payload(GROUP, NAME, len(payload)) == payload
    store.remove(GROUP, [NAME])
    store.close()


def test_an_answer_that_only_trickles_ends_with_the_deadline(proxy: FarProxy) -> None:
    """Each byte came within the time of a first byte, and the last one after minutes."""
    store = store_at(proxy, first_s=1.0, whole_s=0.3)
    store.put(GROUP, NAME, b"head", bytes(1 << 18), 100)
    proxy.bytes_per_s = 1e5
    began_s = time.perf_counter()

    with pytest.raises(StoreTrouble, match="it did not answer in time"):
        store.payload(GROUP, NAME, 1 << 18)

    assert time.perf_counter() - began_s < 2.0
    proxy.bytes_per_s = 0.0
    store.remove(GROUP, [NAME])
    store.close()


def test_a_partition_is_one_deadline_and_the_chat_goes_on(proxy: FarProxy) -> None:
    store = store_at(proxy)
    store.ping()
    proxy.is_partitioned = True
    began_s = time.perf_counter()

    with pytest.raises(StoreTrouble, match="it did not answer in time"):
        store.heads(GROUP, [NAME])

    assert time.perf_counter() - began_s < 2.0
    proxy.is_partitioned = False
    store.ping()  # over a new connection
    store.close()


@contextmanager
def lying_server(lie: bytes) -> Iterator[int]:
    """Yield the port of a server that answers GET with a lie and endless bytes, else with OK."""

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            while asked := connection.recv(1 << 16):
                if b"\r\nGET\r\n" not in asked:
                    connection.sendall(b"+OK\r\n" * len(re.findall(rb"\*\d+\r\n", asked)))
                    continue
                connection.sendall(lie)
                while True:
                    connection.sendall(bytes(1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.parametrize("lie", [b"$40000000000\r\n", b"+", b"$-7\r\n", b"*1000000000\r\n$5\r\n"])
def test_a_server_that_returns_gigabytes_is_cut_off(lie: bytes) -> None:
    with lying_server(lie) as port:
        store = open_store(f"valkey://127.0.0.1:{port}/0", Deadlines(1.0, 0.5))
        began_s = time.perf_counter()
        with suppress(StoreTrouble):  # a number below zero is no payload
            assert store.payload(GROUP, NAME, 1 << 20) is None
        assert time.perf_counter() - began_s < 5.0
        store.close()
