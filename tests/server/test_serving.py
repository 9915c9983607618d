"""The socket that the server listens on."""

import asyncio
import socket

import pytest

from kvchat.server.serving import bound_socket


def test_a_small_piece_is_sent_at_once() -> None:
    """The first token of a stream waited for the client to acknowledge the piece before it: 40 ms
    on Linux. asyncio sets TCP_NODELAY only on sockets that say that their protocol is TCP.
    """

    async def accepted_option() -> int:
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            told.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        bound = bound_socket("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            option = await told
            writer.close()
        return option

    assert asyncio.run(accepted_option())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_free_port_is_taken(host: str) -> None:
    with bound_socket(host, 0) as bound:
        assert bound.getsockname()[1] > 0
