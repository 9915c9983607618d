"""The socket that the server listens on."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kvchat.server.serving import HastyProtocol, HastySockets, bound_socket


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


async def answer_of(
    app: Any, sent: bytes, is_half_closed: bool = False, handshake: bytes = b""
) -> bytes:
    """Return all that a server of `app` answers on one connection until it closes it.

    What answers a `handshake` before is left out.
    """
    config = uvicorn.Config(
        app, http=HastyProtocol, ws=HastySockets, lifespan="off", log_config=None
    )
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: HastyProtocol(config, state, {}, loop), "127.0.0.1", 0
    )
    async with server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        if handshake:
            writer.write(handshake)
            await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        if is_half_closed:
            writer.write_eof()
        answered = await reader.read()
        writer.close()
        return answered


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: loc", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_connection_without_a_whole_request_is_closed(monkeypatch, sent):
    """A client that sent half of its headers kept its connection for ever."""
    monkeypatch.setattr("kvchat.server.serving._HEADERS_S", 0.02)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert asyncio.run(answer_of(app, sent))[:12] in (b"", b"HTTP/1.1 204", b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("version", "connection", "is_answered"),
    [("1.1", "close", True), ("1.0", "close", True), ("1.1", "keep-alive", False)],
)
def test_a_client_that_has_said_all_and_listens_is_answered(
    monkeypatch: pytest.MonkeyPatch, version: str, connection: str, is_answered: bool
) -> None:
    """It got no byte. One that keeps its connection and ends it has gone."""
    monkeypatch.setattr("kvchat.server.serving._LOOK_S", 0.01)
    num_looks, look = 0, HastyProtocol._look_for_client

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while num_looks < 3:
            await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    def counted(protocol: HastyProtocol) -> None:
        nonlocal num_looks
        num_looks += 1
        look(protocol)

    monkeypatch.setattr(HastyProtocol, "_look_for_client", counted)
    head = f"GET / HTTP/{version}\r\nHost: localhost\r\nConnection: {connection}\r\n\r\n"

    answered = asyncio.run(answer_of(app, head.encode(), is_half_closed=True))

    assert (b" 200 OK" in answered) == is_answered
    assert (b"done" in answered) == is_answered
    assert answered.count(b" 102 ") == (3 if is_answered and version == "1.1" else 0)


def turns_of(kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Let each turn of a protocol be as short as can be; return a list that grows with each."""
    monkeypatch.setattr("kvchat.server.serving._TURN_S", 0.0)
    turns: list[None] = []
    take_turn = kind._take_turn
    monkeypatch.setattr(kind, "_take_turn", lambda self: (turns.append(None), take_turn(self)))
    return turns


HEAD = (
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)


@pytest.mark.parametrize(
    ("end", "answer"), [(b"0\r\n\r\n", b"30000"), (b"no chunk\r\n", b"400 Bad Request")]
)
def test_many_small_chunks_are_parsed_in_turns(monkeypatch, end, answer):
    """200,000 chunks of one byte stopped all other connections for 2.6 s."""
    turns = turns_of(HastyProtocol, monkeypatch)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(len(body)).encode()})

    answered = asyncio.run(answer_of(app, HEAD + b"1\r\nx\r\n" * 30_000 + end))

    assert answer in answered
    assert len(turns) >= 30_000 * 6 // 4096


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
# With the bit of a mask, which is zeros: a message of one letter, a pong, and the end.
MESSAGE, PONG, CLOSE = b"\x81\x81\0\0\0\0x", b"\x8a\x80\0\0\0\0", b"\x88\x80\0\0\0\0"


def test_many_small_frames_are_parsed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sent 40,000 pongs at once, and all other connections waited for a second."""
    turns = turns_of(HastySockets, monkeypatch)
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] != "websocket.disconnect":
            told.append(message["text"])

    sent = PONG * 10_000 + MESSAGE * 300 + PONG * 10_000 + MESSAGE + CLOSE

    assert asyncio.run(answer_of(app, sent, handshake=HANDSHAKE))[:1] == CLOSE[:1]
    assert told == ["x"] * 301
    assert len(turns) >= 20_000 * len(PONG) // 4096


def test_a_connection_is_kept_for_a_while_after_a_long_answer() -> None:
    """The look that came next closed it, at once after an answer of more than 15 seconds."""
    closed: list[str] = []
    protocol = HastyProtocol.__new__(HastyProtocol)
    protocol.cycle = cycle = SimpleNamespace(response_complete=False)  # type: ignore[assignment]
    protocol.transport = SimpleNamespace(close=lambda: closed.append("closed"))  # type: ignore[assignment]
    protocol.loop = SimpleNamespace(call_later=lambda *_: None)  # type: ignore[assignment]
    protocol._close_if_idle()
    protocol._close_if_idle()

    cycle.response_complete = True
    protocol._close_if_idle()
    assert closed == []

    protocol._close_if_idle()
    assert closed == ["closed"]
