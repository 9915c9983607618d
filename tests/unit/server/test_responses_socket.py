"""Responses over a WebSocket: its events, its errors, and what it may cost.

The server and its sockets are real ones, above a scripted engine.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from kvchat.server.guard import App, Limits
from kvchat.server.serving import configured
from support.asgi_client import get, post
from support.http_servers import serving_app
from support.scripted_engine import Script
from support.served import Serve

PATH = "/v1/responses"
PATIENCE_S = 60.0

Open = Callable[..., AbstractContextManager[ClientConnection]]


@contextmanager
def running(app: App) -> Iterator[tuple[uvicorn.Server, str]]:
    """Yield a real server of an application, and the address of its sockets."""
    with serving_app(configured(app)) as (server, port):
        yield server, f"ws://127.0.0.1:{port}{PATH}"


@pytest.fixture
def address() -> Iterator[Callable[[App], str]]:
    with ExitStack() as servers:
        yield lambda app: servers.enter_context(running(app))[1]


def said(socket: ClientConnection, given: Any = None, **others: Any) -> list[dict[str, Any]]:
    """Send a message, where there is one, and return the events of one response or its error."""
    if given is not None:
        told = {"type": "response.create", "model": "scripted", "input": given, **others}
        socket.send(json.dumps(told))
    events = [json.loads(socket.recv(PATIENCE_S))]
    ends = ("response.completed", "response.incomplete", "response.failed", "error")
    while events[-1]["type"] not in ends:
        events.append(json.loads(socket.recv(PATIENCE_S)))
    return events


def text_of(events: list[dict[str, Any]]) -> str:
    return events[-1]["response"]["output"][-1]["content"][0]["text"]


def without_names(value: Any) -> Any:
    """Return events without what differs between two answers to the same request."""
    if isinstance(value, dict):
        changing = ("id", "item_id", "created_at", "completed_at", "usage")
        return {k: without_names(v) for k, v in value.items() if k not in changing}
    return [without_names(item) for item in value] if isinstance(value, list) else value


def test_a_socket_tells_the_events_of_a_stream(serve: Serve, address: Any) -> None:
    app = serve(lambda question, sample: Script(f"<think>why</think>{question}"))
    with connect(address(app)) as socket:
        over_socket = [said(socket, "abc"), said(socket, "abc")]
    asked = {"model": "scripted", "input": "abc", "stream": True}
    over_http = [data for _, data in post(app, PATH, asked).events]

    for events in over_socket:
        assert without_names(events) == without_names(over_http)
    counts = get(app, "/metrics").body.decode()
    assert f'kvchat_requests_total{{path="{PATH}",status="200"}} 3\n' in counts


def test_a_response_that_is_not_stored_is_continued_on_its_connection_alone(serve, address):
    app = serve(lambda question, sample: Script(question))
    url = address(app)
    with connect(url) as socket:
        first = said(socket, "a", store=False)[-1]["response"]
        second = said(socket, "b", store=False, previous_response_id=first["id"])[-1]["response"]
        third = said(socket, "c", store=False, previous_response_id=second["id"])[-1]["response"]
        gone = said(socket, "d", previous_response_id=first["id"])[-1]
    with connect(url) as socket:
        elsewhere = said(socket, "d", previous_response_id=third["id"])[-1]

    assert (first["store"], third["previous_response_id"]) == (False, second["id"])
    tokens = [response["usage"]["input_tokens"] for response in (first, second, third)]
    assert tokens[1] - tokens[0] == tokens[2] - tokens[1] > 0
    for error in (gone, elsewhere):
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
    assert get(app, f"{PATH}/{third['id']}").status == 404


def test_a_stored_response_is_continued_on_another_connection(serve: Serve, address: Any) -> None:
    url = address(serve())
    with connect(url) as socket:
        first = said(socket, "a")[-1]["response"]
    with connect(url) as socket:
        assert text_of(said(socket, "b", previous_response_id=first["id"])) == "b 0"


def test_a_continuation_that_fails_lets_go_of_what_it_continued(serve: Serve, address: Any) -> None:
    with connect(address(serve())) as socket:
        first = said(socket, "a", store=False)[-1]["response"]["id"]
        result = {"type": "function_call_output", "call_id": "call_x", "output": "y"}
        failed = said(socket, [result], store=False, previous_response_id=first)[-1]
        again = said(socket, "b", store=False, previous_response_id=first)[-1]

    assert (failed["status"], failed["error"]["code"]) == (400, "invalid_value")
    assert again["error"]["code"] == "previous_response_not_found"


def test_a_conversation_longer_than_a_message_may_be_is_not_held(serve, address):
    with connect(address(serve(limits=Limits(body_bytes=300)))) as socket:
        first = said(socket, "a" * 100, store=False)[-1]["response"]["id"]
        held = said(socket, "b" * 100, store=False, previous_response_id=first)[-1]["response"]
        error = said(socket, "c", store=False, previous_response_id=held["id"])[-1]

    assert error["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        ("no JSON", 400, None),
        (b"\xff", 400, None),
        ("[]", 400, None),
        ('{"type": "session.update"}', 400, "type"),
        ('{"type": "response.create", "stream": true}', 400, "stream"),
        ('{"type": "response.create", "background": true}', 400, "background"),
        ('{"type": "response.create", "model": "other one"}', 404, "model"),
        ('{"type": "response.create", "model": "scripted"}', 400, "input"),
        (" " * 5000, 413, None),
    ],
)
def test_a_bad_message_gets_an_error_and_the_next_one_its_answer(
    serve: Serve, address: Any, sent: str | bytes, status: int, param: str | None
) -> None:
    with connect(address(serve(limits=Limits(body_bytes=4096)))) as socket:
        socket.send(sent)
        [error] = said(socket)
        assert (error["type"], error["status"], error["error"]["param"]) == ("error", status, param)
        assert error["error"]["code"]
        assert error["error"]["message"]
        assert text_of(said(socket, "x")) == "x 0"


def test_an_answer_that_fails_ends_with_one_event(serve: Serve, address: Any) -> None:
    """Over HTTP an error comes after it; here that would be taken for the next response's."""

    def fails(question: str, sample: int) -> Script:
        error = RuntimeError("broken") if question == "break" else None
        return Script("x" * 100_000, step_s=0.001, error=error)

    url = address(serve(fails))
    with connect(url) as socket, connect(url) as other:
        told = {"type": "response.create", "model": "scripted", "max_output_tokens": 90_000}
        socket.send(json.dumps({**told, "input": "x"}))
        while json.loads(socket.recv(PATIENCE_S))["type"] != "response.output_text.delta":
            pass
        said(other, "break")
        failed, after = said(socket)[-1], said(socket, "x")

    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert [event["status"] for event in after] == [500]


def test_messages_that_come_meanwhile_are_answered_in_their_order(serve, address, monkeypatch):
    monkeypatch.setattr("kvchat.server.responses_socket.MOST_WAITING", 2)
    is_asked, may_answer = threading.Event(), threading.Event()

    def waits(question: str, sample: int) -> Script:
        is_asked.set()
        assert may_answer.wait(PATIENCE_S)
        return Script(question)

    told = {"type": "response.create", "model": "scripted"}
    with connect(address(serve(waits))) as socket:
        socket.send(json.dumps({**told, "input": "0"}))
        assert is_asked.wait(PATIENCE_S)
        for number in range(1, 5):
            socket.send(json.dumps({**told, "input": str(number)}))
        refused = [said(socket)[-1] for _ in range(2)]
        may_answer.set()
        answers = [text_of(said(socket)) for _ in range(3)]

    for event in refused:
        assert (event["status"], event["error"]["code"]) == (429, "too_many_messages")
    assert answers == ["0", "1", "2"]


def test_a_client_that_goes_cancels_its_answer(serve: Serve, address: Any) -> None:
    app = serve(lambda question, sample: Script("x" * 100_000, step_s=0.001))
    url = address(app)
    # Behind a full queue of unread messages the client waits ten seconds for the end.
    with connect(url, max_queue=None) as socket:
        told = {"type": "response.create", "model": "scripted", "max_output_tokens": 90_000}
        socket.send(json.dumps({**told, "input": "x"}))
        while json.loads(socket.recv(PATIENCE_S))["type"] != "response.output_text.delta":
            pass
        assert "kvchat_requests_running 1\n" in get(app, "/metrics").body.decode()

    deadline = threading.Event()
    timer = threading.Timer(PATIENCE_S, deadline.set)
    timer.start()
    while "kvchat_requests_running 0\n" not in get(app, "/metrics").body.decode():
        assert not deadline.is_set(), "the answer goes on"
    timer.cancel()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer sesam"}, 401),
        ({"Authorization": "Bearer sesame", "Origin": "https://evil.example"}, 403),
        ({"Authorization": "Bearer sesame", "Origin": "null"}, 403),
        ({"Authorization": "Bearer sesame", "Origin": "http://localhost:3000"}, 403),
        ({"Authorization": "Bearer sesame"}, 101),
        ({"x-api-key": "sesame"}, 101),
    ],
)
def test_a_handshake_needs_the_key_and_no_other_site(serve, address, caplog, headers, status):
    url = address(serve(api_key="sesame"))
    if status == 101:
        with connect(url, additional_headers=headers) as socket:
            assert text_of(said(socket, "x")) == "x 0"
        return
    with pytest.raises(InvalidStatus) as refused:
        connect(url, additional_headers=headers)
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["error"]["message"]
    with pytest.raises(InvalidStatus):
        connect(url, additional_headers=headers)
    assert not caplog.records, "each refusal once was a fault in the log"


def test_there_is_a_most_of_sockets(serve, address, monkeypatch):
    monkeypatch.setattr("kvchat.server.responses_socket.MOST_SOCKETS", 1)
    url = address(serve())
    with connect(url) as socket:
        with pytest.raises(InvalidStatus) as refused:
            connect(url)
        assert refused.value.response.status_code == 503
        assert text_of(said(socket, "x")) == "x 0"


def test_a_connection_that_is_too_old_is_told_so_and_closed(serve, address, monkeypatch):
    monkeypatch.setattr("kvchat.server.responses_socket._MOST_S", 0.0)
    with connect(address(serve())) as socket:
        assert said(socket)[-1]["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            socket.recv(PATIENCE_S)


def test_a_socket_outlives_the_look_for_connections_without_a_request(serve, address, monkeypatch):
    monkeypatch.setattr("kvchat.server.serving._HEADERS_S", 0.02)
    app = serve(lambda question, sample: Script("x" * 40, step_s=0.02))
    with connect(address(app)) as socket:
        assert text_of(said(socket, "x")) == "x" * 40


def test_a_server_that_ends_answers_before_it_closes_its_sockets(serve, tmp_path):
    """Answers over HTTP had a few seconds; over a socket they were cut off at once."""
    until = tmp_path / "until"
    app = serve(lambda question, sample: Script("half" * 2, until=until))
    with running(app) as (server, url), connect(url) as socket:
        told = {"type": "response.create", "model": "scripted"}
        for question in ("one", "two"):
            socket.send(json.dumps({**told, "input": question}))
        while json.loads(socket.recv(PATIENCE_S))["type"] != "response.output_text.delta":
            pass
        server.should_exit = True
        while server.servers and server.servers[0].is_serving():
            time.sleep(0)
        until.touch()
        assert [text_of(said(socket)) for _ in range(2)] == ["halfhalf"] * 2
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(PATIENCE_S)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012


def test_a_server_that_ends_cuts_off_what_takes_too_long(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("kvchat.server.serving._GRACE_S", 0.01)
    app = serve(lambda question, sample: Script("half" * 2, until=tmp_path / "never"))
    with running(app) as (server, url), connect(url) as socket:
        socket.send(json.dumps({"type": "response.create", "model": "scripted", "input": "x"}))
        while json.loads(socket.recv(PATIENCE_S))["type"] != "response.output_text.delta":
            pass
        server.should_exit = True
        assert said(socket)[-1]["response"]["error"]["code"] == "stopped"


def test_a_server_that_ends_closes_its_sockets(serve: Serve) -> None:
    with running(serve()) as (server, url), connect(url) as socket:
        assert text_of(said(socket, "x")) == "x 0"
        server.should_exit = True
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(PATIENCE_S)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012
