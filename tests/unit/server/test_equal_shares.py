"""Who sends a request is told to the engine, which gives clients equal shares."""

from typing import Any

import pytest
from starlette.requests import HTTPConnection

from kvchat.server.guard import client_of
from support.asgi_client import get, post
from support.served import Serve

_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": ["x", "y"]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "/v1/responses": {"input": "x"},
    "/v1/responses/compact": {"input": "x"},
}


@pytest.mark.parametrize("path", _BODIES)
def test_every_interface_tells_who_asks(serve: Serve, asked: list[Any], path: str) -> None:
    got = post(serve(), path, {"model": "scripted", **_BODIES[path]}, **{"user-agent": "Codex/1"})

    assert got.status == 200, got.json
    assert {spec.client for spec in asked} == {"here Codex/1"}


@pytest.mark.parametrize(
    ("address", "program", "client"),
    [
        ("192.0.2.7", b"one", "192.0.2.7"),  # over the network a name of its own gives no share
        ("::1", b"one", "here one"),
        ("127.0.0.1", b"x" * 500, "here " + "x" * 200),
        (None, b"one", "here one"),
    ],
)
def test_a_client_is_an_address_or_a_program_of_this_machine(address, program, client):
    scope = {
        "type": "http",
        "headers": [(b"user-agent", program)],
        "client": (address, 5) if address is not None else None,
    }

    assert client_of(HTTPConnection(scope)) == client


def test_a_client_with_an_address_of_its_own_is_told_what_was_computed_for_it(serve):
    """`kvchat launch` took the work for other clients for that of its own."""
    app, path = serve(), "v1/chat/completions"
    body = {"model": "scripted", **_BODIES[f"/{path}"]}
    post(app, f"/as/one-1/{path}", body)
    computed = get(app, "/as/one-1/health").json["computed_tokens"]
    post(app, f"/as/other/{path}", body)
    post(app, f"/{path}", body)

    assert get(app, "/as/one-1/health").json["computed_tokens"] == computed > 0
    assert get(app, "/as/none/health").json["computed_tokens"] == 0
    assert "computed_tokens" not in get(app, "/health").json
