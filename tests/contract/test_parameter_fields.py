"""The parameters of answers are fields of every interface, and flags of a server their defaults."""

from contextlib import ExitStack
from typing import Any

import pytest

from kvchat.chat.answer_settings import with_values
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.fields import Fields
from kvchat.chat.host import ChatHost
from kvchat.core.parameters import OF_ANSWERS
from kvchat.core.text import Size
from kvchat.server.generation_fields import sampling_options
from support.asgi_client import post
from support.scripted_engine import Script, scripted_build
from support.served import Serve, echo, served_by
from support.tiny_host import answer_options

USER = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": USER, "max_tokens": 8},
}
# What an interface calls a parameter; None if it has no such field.
NAMES: dict[str, dict[str, str | None]] = {
    "/v1/completions": {"think": None},
    "/v1/responses": {"max_tokens": "max_output_tokens", "stop": None},
    "/v1/messages": {"stop": "stop_sequences"},
}
GOOD: dict[str, Any] = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 5.0,
    "min_p": 0,
    "repetition_penalty": 1.5,
    "seed": 7,
    "max_tokens": 3,
    "repetition_limit": 256,
    "stop": ["zzz"],
    "think": "low",
    "context_policy": "stop",
    "kv_budget": "25%",
}
EFFORTS = "none, minimal, low, medium, high, xhigh, max, auto, on, off"
BAD: dict[str, tuple[Any, str]] = {
    "temperature": (-1, "is -1, but must be 0 to 100."),
    "top_p": ("x", "is 'x', but must be a number."),
    "top_k": (2.5, "is 2.5, but must be a whole number."),
    "min_p": (2, "is 2, but must be 0 to 1."),
    "repetition_penalty": (True, "is True, but must be a number."),
    "seed": ("7", "is '7', but must be a whole number."),
    "max_tokens": (-3, "is -3, but must be 1 or more."),
    "repetition_limit": (5, "is 5, but must be 0 (off) or at least 128."),
    "stop": (5, "is 5, but must be a text or a list of texts."),
    "think": ("hard", f"is 'hard', but must be one of {EFFORTS}."),
    "context_policy": ("x", "is 'x', but must be one of stop, drop, compact."),
    "kv_budget": (0.25, "is 0.25, but must be a size."),
}


def fields_of(path: str) -> list[tuple[str, str]]:
    names = NAMES.get(path, {})
    # Each interface has a field of its own for formats.
    settings = [parameter.name for parameter in OF_ANSWERS if parameter.name != "format"]
    pairs = [(name, names.get(name, name)) for name in settings]
    return [(name, field) for name, field in pairs if field is not None]


@pytest.mark.parametrize("path", BODIES)
def test_every_parameter_is_a_field_of_every_interface(serve, asked, path):
    body = {"model": "scripted", **BODIES[path]}
    body |= {field: GOOD[name] for name, field in fields_of(path)}

    assert post(serve(), path, body).status == 200

    [spec] = asked
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 5)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0, 1.5, 7)
    assert (spec.max_tokens, spec.repetition_limit) == (3, 256)
    assert spec.thinning.budget == Size(share=0.25)


@pytest.mark.parametrize("path", BODIES)
def test_a_number_that_is_too_large_is_refused_as_one(serve: Serve, path: str) -> None:
    """A limit of 10 ** 30 tokens had to be "1 or more"."""
    field = dict(fields_of(path))["max_tokens"]

    got = post(serve(), path, {"model": "scripted", **BODIES[path], field: 10**30})

    assert got.json["error"]["message"] == f"{field} is {10**30}, but must be nearer to 0."


@pytest.mark.parametrize("path", BODIES)
def test_a_bad_field_is_refused_in_the_words_of_the_flags(serve: Serve, path: str) -> None:
    app = serve()
    for name, field in fields_of(path):
        value, words = BAD[name]
        words = words.replace("1 or more", "0 or more") if path == "/v1/completions" else words

        got = post(app, path, {"model": "scripted", **BODIES[path], field: value})

        assert got.status == 400, name
        error = got.json["error"]
        assert error["message"] == f"{field} {words}"
        assert error.get("param", field) == field


def test_a_request_without_a_field_gets_what_the_server_was_given() -> None:
    given = {"top_k": 5, "min_p": 0.1, "seed": 7, "repetition_limit": 300}
    base = with_values(answer_options(), given)

    plain = sampling_options(Fields({}), base)
    own = sampling_options(Fields({"top_k": 9, "seed": -1}), base)

    assert plain == base
    assert (own.sampling.top_k, own.sampling.min_p, own.seed) == (9, 0.1, None)


@pytest.mark.parametrize(
    ("messages", "begins"),
    [(USER, "system\nBe brief."), ([{"role": "system", "content": "Own."}, *USER], "system\nOwn.")],
)
def test_a_server_has_a_system_prompt_for_conversations_without_one(model, asked, messages, begins):
    """`kvchat serve --system` was no such option."""
    host = ChatHost(model, scripted_build(model, echo), None)
    with ExitStack() as parts:
        parts.callback(host.close)
        host.wait_until_ready()
        app = parts.enter_context(served_by(host, system="Be brief."))

        assert post(app, "/v1/chat/completions", {"model": "scripted", "messages": messages})

    assert model.tokenizer.decode(asked[0].prompt_ids).startswith(begins)


def test_an_answer_ends_at_the_servers_limit_of_time(model: ChatModel) -> None:
    """`kvchat serve --timeout` was no such option."""

    def slow(question: str, sample: int) -> Script:
        return Script("x" * 4000, step_s=0.01)

    host = ChatHost(model, scripted_build(model, slow), None)
    with ExitStack() as parts:
        parts.callback(host.close)
        host.wait_until_ready()
        app = parts.enter_context(served_by(host, limit_s=0.1))

        got = post(app, "/v1/chat/completions", {"model": "scripted", "messages": USER})

    [choice] = got.json["choices"]
    assert choice["finish_reason"] == "length"
    assert 0 < len(choice["message"]["content"]) < 4000
