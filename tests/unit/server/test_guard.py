"""The guard: keys, other sites, sizes, slow bodies, clients that go; and the counts of it all."""

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Sequence

import pytest

from kvchat.server.guard import Guard, Limits, Message
from support.asgi_client import call, get, post
from support.scripted_engine import Script
from support.served import Serve

CHAT = "/v1/chat/completions"
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}


def test_the_limit_of_a_body_holds_for_a_compressed_one_too(serve: Serve) -> None:
    """Another limit was written down for these."""
    app, body = serve(limits=Limits(body_bytes=300)), {**BODY, "user": "x" * 300}

    got = post(app, CHAT, gzip.compress(json.dumps(body).encode()), **{"content-encoding": "gzip"})

    assert got.status == 413


def test_a_key_is_asked_for_in_either_header(serve: Serve) -> None:
    app = serve(api_key="sesame")

    assert post(app, CHAT, BODY).status == 401
    assert post(app, CHAT, BODY, authorization="Bearer sesam").status == 401
    assert post(app, CHAT, BODY, authorization="Bearer sesame").status == 200
    assert post(app, "/v1/messages", BODY, **{"x-api-key": "wrong"}).json["type"] == "error"
    assert post(app, CHAT, BODY, **{"x-api-key": "sesame"}).status == 200
    assert get(app, "/health").status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example:8642"}, 403),
        ({"host": "evil.example@127.0.0.1"}, 403),
        ({"host": "127.0.0.1@evil.example"}, 403),
        ({"host": "127.0.0.1:8642@evil.example:8642"}, 403),
        ({"host": "127.0.0.1/evil.example"}, 403),
        ({"host": "127.0.0.1, evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example@127.0.0.1"}, 403),
        ({"origin": "http://127.0.0.1\\@evil.example"}, 403),
        ({"origin": "http://127.0.0.1 http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1/"}, 403),
        ({"origin": "//127.0.0.1"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "http://[::1]:3000"}, 200),
        ({"host": "LocalHost:8642"}, 200),
        ({"host": "kvchat.localhost"}, 200),
        ({"host": "127.0.0.1:8642"}, 200),
        ({"host": "[::1]:8642"}, 200),
    ],
)
def test_web_pages_of_other_sites_are_refused(serve, headers, status):
    got = post(serve(), CHAT, BODY, **headers)

    assert got.status == status
    assert not [name for name in got.headers if name.startswith("access-control")]


async def never(*_: object) -> Message:
    raise AssertionError("the guard refuses what it has heard so far")


def refusal(
    limits: Limits,
    receive: Callable[[], Awaitable[Message]],
    headers: Sequence[tuple[bytes, bytes]] = ((b"host", b"localhost"),),
    key: str | None = None,
) -> int:
    """Return the status with which a request is refused before it reaches the application."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": CHAT, "headers": list(headers), "method": "POST"}
    asyncio.run(Guard(never, key, limits)(scope, receive, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


@pytest.mark.parametrize("name", ["host", "origin", "authorization", "x-api-key"])
def test_a_header_that_is_checked_comes_once(name: str) -> None:
    """Of two Origins the last one counted: whatever a browser's own said, the other let it in."""
    good = {"host": b"localhost", "origin": b"http://localhost", "x-api-key": b"sesame"}
    good["authorization"] = b"Bearer sesame"
    values = {"host": good["host"], name: good[name]}
    headers = [(given.encode(), value) for given, value in values.items()]
    headers.append((name.title().encode(), good[name]))
    assert refusal(Limits(), never, headers, "sesame") == 400


def test_a_body_that_is_too_large_is_refused_announced_or_not(serve: Serve) -> None:
    app = serve(limits=Limits(body_bytes=100))

    assert post(app, CHAT, b"x" * 200).status == 413
    assert post(app, CHAT, b"", **{"content-length": "500"}).status == 413


@pytest.mark.parametrize(("num_pieces", "num_read"), [(3, 3), (50, 5)])
def test_a_body_that_is_too_large_is_read_to_its_end_but_not_one_without_end(num_pieces, num_read):
    """A connection closed while the client sent: it saw a broken connection instead of the 413."""
    left = num_pieces

    async def receive() -> Message:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": b"x" * 100, "more_body": left > 0}

    assert refusal(Limits(body_bytes=100), receive) == 413
    assert num_pieces - left == num_read


def test_a_body_that_does_not_end_is_given_up() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    assert refusal(Limits(body_s=0.01), receive) == 408


def test_a_client_that_goes_cancels_its_request(serve: Serve) -> None:
    app = serve(lambda question, sample: Script("x" * 100_000, step_s=0.001))
    streamed = json.dumps({**BODY, "stream": True, "max_tokens": 90_000}).encode()
    whole = json.dumps({**BODY, "max_tokens": 90_000}).encode()

    async def leave() -> None:
        got = await call(app, "POST", CHAT, streamed, leaves_after=lambda got: b"xx" in got.body)
        assert b"xx" in got.body
        assert b"[DONE]" not in got.body
        assert (await call(app, "POST", CHAT, whole, leaves_after=lambda got: True)).status == 499

    asyncio.run(leave())

    assert "kvchat_requests_running 0\n" in get(app, "/metrics").body.decode()


def test_many_streams_at_once_all_end(serve: Serve) -> None:
    app = serve()

    async def ask_all() -> list[bytes]:
        bodies = [
            json.dumps(
                {**BODY, "stream": True, "messages": [{"role": "user", "content": f"number {i}"}]}
            ).encode()
            for i in range(200)
        ]
        return [
            got.body for got in await asyncio.gather(*(call(app, "POST", CHAT, b) for b in bodies))
        ]

    assert all(body.endswith(b"data: [DONE]\n\n") for body in asyncio.run(ask_all()))
    counts = get(app, "/metrics").body.decode()
    assert 'kvchat_requests_total{path="/v1/chat/completions",status="200"} 200' in counts
    assert "kvchat_ttft_seconds_count 200" in counts


def test_unknown_paths_and_methods_get_the_interfaces_error(serve: Serve) -> None:
    app = serve()

    assert get(app, "/nowhere").json["error"]["type"] == "invalid_request_error"
    refused = get(app, CHAT)
    assert refused.status == 405
    assert refused.headers["allow"] == "POST"
