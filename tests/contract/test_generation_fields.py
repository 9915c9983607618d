"""The fields that change how tokens are chosen: what is read from them, and what is refused."""

from typing import Any

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.fields import FieldFault, Fields
from kvchat.core.types import SamplingParams
from kvchat.server.generation_fields import with_penalties
from support.asgi_client import post
from support.served import Serve

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"model": "scripted", "prompt": "hello"},
}


@pytest.mark.parametrize("path", BODIES)
def test_penalties_and_biases_reach_the_sampler(serve: Serve, asked: list[Any], path: str) -> None:
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -2,
        "logit_bias": {"7": -100, "65": 1.5, "9": 0},
    }

    assert post(serve(), path, BODIES[path] | fields).status == 200

    [spec] = asked
    expected = SamplingParams(
        temperature=0.0,
        presence_penalty=0.5,
        frequency_penalty=-2.0,
        logit_bias=((7, -100.0), (65, 1.5)),
        seed=spec.sampling.seed,
    )
    assert spec.sampling == expected


def test_fields_that_are_off_change_nothing(serve: Serve, asked: list[Any]) -> None:
    off = {"presence_penalty": 0, "frequency_penalty": None, "logit_bias": {}}

    assert post(serve(), CHAT, BODIES[CHAT] | off).status == 200

    assert not asked[0].needs_logits


BAD: dict[str, tuple[str, Any]] = {
    "a penalty above 2": ("presence_penalty", 2.5),
    "a penalty that is no number": ("frequency_penalty", "0.5"),
    "a penalty that is true": ("frequency_penalty", True),
    "a huge penalty": ("presence_penalty", 1e300),
    "a list of biases": ("logit_bias", [1, 2]),
    "a bias of a word": ("logit_bias.hello", {"hello": 1}),
    "a bias of a negative id": ("logit_bias.-1", {"-1": 1}),
    "a bias with a huge id": (f"logit_bias.{'9' * 5000}", {"9" * 5000: 1}),
    "a bias above 100": ("logit_bias.5", {"5": 101}),
    "a bias that is no number": ("logit_bias.5", {"5": None}),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("path", BODIES)
def test_a_bad_value_is_refused_by_the_name_of_its_field(serve, path, name):
    field, value = BAD[name]

    got = post(serve(), path, BODIES[path] | {field.partition(".")[0]: value})

    assert got.status == 400
    assert got.json["error"]["param"] == field
    assert got.json["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["presence_penalty", "temperature"])
def test_numbers_that_are_none_are_refused(serve: Serve, field: str, word: str) -> None:
    body = f'{{"model":"scripted","prompt":"x","{field}":{word}}}'.encode()

    got = post(serve(), TEXT, body)

    assert (got.status, got.json["error"]["param"]) == (400, field)


@pytest.mark.parametrize(("token", "is_known"), [("299", True), ("300", False)])
def test_a_bias_needs_a_token_of_the_model(token: str, is_known: bool) -> None:
    fields = Fields({"logit_bias": {token: 1}})

    if is_known:
        assert with_penalties(fields, AskOptions(), 300).sampling.logit_bias == ((299, 1.0),)
        return
    with pytest.raises(FieldFault) as caught:
        with_penalties(fields, AskOptions(), 300)
    assert caught.value.param == "logit_bias.300"
