"""Fields as other servers have them: they do what they do there, or are refused by name."""

import gzip
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest

from kvchat.server.guard import App
from support.asgi_client import Got, post
from support.served import Serve

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
ASKED = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "scripted", "messages": ASKED},
    TEXT: {"model": "scripted", "prompt": "hello"},
    RESPONSES: {"model": "scripted", "input": "hello"},
    MESSAGES: {"model": "scripted", "max_tokens": 50, "messages": ASKED},
}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"min_p": None, "guided_grammar": "root ::= x"}),
    (CHAT, {"grammar": "root ::= x"}),
    (CHAT, {"typical_p": 0.5}),
    (CHAT, {"bad_words": ["x"]}),
    (CHAT, {"best_of": 3}),
    (CHAT, {"function_call": {"name": "f"}}),
    (CHAT, {"modalities": ["text", "audio"]}),
    (CHAT, {"options": {"num_ctx": 9}}),
    (CHAT, {"format": "json"}),
    (CHAT, {"chat_template": "{{ x }}"}),
    (CHAT, {"skip_special_tokens": False}),
    (CHAT, {"echo": True}),
    (CHAT, {"mirostat": 2}),
    (TEXT, {"best_of": 2}),
    (TEXT, {"use_beam_search": True}),
    (RESPONSES, {"response_format": {"type": "json_object"}}),
    (RESPONSES, {"n": 2}),
    (RESPONSES, {"stop": "x"}),
    (RESPONSES, {"max_tokens": 5}),
    (MESSAGES, {"response_format": {"type": "json_object"}}),
    (MESSAGES, {"logit_bias": {"5": 1}}),
    (MESSAGES, {"n": 2}),
    (MESSAGES, {"stop": ["x"]}),
]


@pytest.fixture
def app(serve: Serve) -> App:
    return serve()


def answered(app: App, path: str, **fields: Any) -> Got:
    got = post(app, path, BODIES[path] | fields)
    assert got.status == 200, (fields, got.body)
    return got


@pytest.mark.parametrize(("path", "fields"), REFUSED)
def test_a_field_that_would_change_the_answer_is_refused_by_its_name(app, path, fields):
    """Each was answered as if it were not there."""
    got = post(app, path, BODIES[path] | fields)

    name = list(fields)[-1]
    assert got.status == 400
    assert f"does not support {name}" in got.json["error"]["message"]
    assert path == MESSAGES or got.json["error"]["param"] == name


NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "typical_p": 1.0,
    "function_call": "auto",
    "modalities": ["text"],
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "mirostat": 0,
    "options": {},
    "stop_token_ids": [],
    "cache_prompt": False,
    "keep_alive": "5m",
    "cache_salt": "x",
    "priority": 3,
    "provider": {"order": ["x"]},
    "user": "me",
    "service_tier": "auto",
    "verbosity": "low",
    "prompt_cache_retention": "24h",
    "a_field_to_come": True,
}


def test_what_changes_nothing_is_accepted(app: App) -> None:
    assert answered(app, CHAT, **NEUTRAL).json["choices"][0]["message"]["content"] == "hello 0"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1, "top_k": -1, "stop": ["", "zzz"], "n": 1.0},
        {"stop": ""},
        {"stop": [str(n) * 9 for n in range(20)]},
        {"top_p": 0},
        {"max_tokens": 50.0},
        {"logprobs": False},
        {"logit_bias": [[65, 1.5], [66, False]]},
        {"tool_choice": {"type": "none"}},
    ],
)
def test_numbers_and_texts_as_other_servers_take_them(app: App, fields: dict[str, Any]) -> None:
    answered(app, CHAT, **fields)


def test_logprobs_of_the_other_openai_interface_are_understood(serve: Serve) -> None:
    app = serve()

    answered(app, TEXT, logprobs=False)
    chosen = answered(app, CHAT, logprobs=2).json["choices"][0]["logprobs"]["content"]

    assert len(chosen[0]["top_logprobs"]) <= 2


def test_what_other_servers_call_a_field_reaches_the_sampler(serve, asked):
    app = serve()

    answered(app, CHAT, repeat_penalty=1.5, n_predict=3)
    answered(app, CHAT, repeat_penalty=1.5, repetition_penalty=1.25)
    answered(app, CHAT, top_k=-1, seed=-1)
    answered(app, CHAT, seed=-1)

    renamed, both, first, second = asked
    assert renamed.sampling.repetition_penalty == 1.5
    assert renamed.max_tokens == 3
    assert both.sampling.repetition_penalty == 1.25
    assert first.sampling.top_k == 0
    assert first.sampling.seed != second.sampling.seed, "-1 is another seed each time"


def test_ends_of_answers_reach_the_engine(serve: Serve, asked: list[Any]) -> None:
    app = serve()

    answered(app, CHAT, stop_token_ids=[70, 71])
    bad = post(app, CHAT, BODIES[CHAT] | {"stop_token_ids": [-1]})
    unknown = post(app, CHAT, BODIES[CHAT] | {"min_tokens": 3})

    assert asked[0].stop_token_ids >= {70, 71}
    assert bad.json["error"]["param"] == "stop_token_ids"
    assert unknown.json["error"]["param"] == "min_tokens", "the scripted model has no number"


def test_an_answer_has_at_least_so_many_tokens(serve, model, asked):
    app = serve(served=replace(model, vocab_size=300))

    answered(app, CHAT, min_tokens=2)
    answered(app, MESSAGES, ignore_eos=True)

    ends = asked[0].stop_token_ids
    least, endless = (spec.new_constraint() for spec in asked)

    def may_end(constraint: Any) -> bool:
        bits = constraint.allowed()
        return bits is None or any(bits[end // 8] >> end % 8 & 1 for end in ends)

    for _ in range(2):
        assert not may_end(least)
        least.accept(65)
    assert may_end(least)
    assert not may_end(endless)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": {"const": "hello 0"}}},
        {"response_format": {"type": "json_schema", "schema": {"const": "hello 0"}}},
        {"guided_json": {"const": "hello 0"}},
        {"guided_json": '{"const": "hello 0"}'},
        {"json_schema": {"const": "hello 0"}},
        {"structured_outputs": {"json": {"const": "hello 0"}}},
        {"guided_choice": ["hello 0", 'a / b\n"c" \\']},
        {"guided_regex": r"a/b|hello \d"},
        {"structured_outputs": {"regex": r"hello \d"}},
        {"structured_outputs": {"choice": ["hello 0"]}},
    ],
)
def test_formats_of_other_servers_limit_the_answer(serve, asked, fields):
    """A schema beside json_object was dropped: any object was an answer."""
    answered(serve(), CHAT, **fields)

    constraint = asked[0].new_constraint()
    bits = constraint.allowed()
    first = [n for n in range(256) if bits[n // 8] >> n % 8 & 1]
    assert 0 < len(first) < 6, "only what begins the format"


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": []},
        {"guided_choice": [1]},
        {"guided_regex": "("},
        {"guided_json": "["},
        {"structured_outputs": {"grammar": "root ::= x"}},
        {"structured_outputs": []},
    ],
)
def test_a_bad_format_of_another_server_names_its_field(app: App, fields: dict[str, Any]) -> None:
    got = post(app, CHAT, BODIES[CHAT] | fields)

    assert got.status == 400
    assert got.json["error"]["param"].startswith(next(iter(fields)))


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", ""])
def test_a_compressed_body_is_read(app: App, encoding: str) -> None:
    plain = json.dumps(BODIES[CHAT]).encode()
    body = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding, bytes)(plain)

    assert post(app, CHAT, body, **{"content-encoding": encoding}).status == 200


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("zstd", b"{}", 415),
        ("gzip, gzip", b"{}", 415),
        ("gzip", b"{}", 400),
        ("gzip", gzip.compress(b"{}")[:-9], 400),
        ("gzip", gzip.compress(b"{}") + b"{}", 400),
        ("gzip", gzip.compress(bytes(40 << 20)), 413),
    ],
    ids=["unknown", "two", "plain", "cut off", "goes on", "a bomb"],
)
def test_a_body_that_cannot_be_decompressed_is_refused(app, encoding, body, status):
    got = post(app, CHAT, body, **{"content-encoding": encoding})

    assert got.status == status
    assert got.json["error"]["message"].endswith(".")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_json_in_other_unicode_encodings_is_read(app: App, encoding: str) -> None:
    assert post(app, CHAT, json.dumps(BODIES[CHAT]).encode(encoding)).status == 200


def test_a_thread_is_refused_with_the_code_at_which_the_sdk_sends_all_again(app: App) -> None:
    """It was read without its beginning, as a conversation of its last message."""
    begun = answered(app, MESSAGES, thread={"type": "create"}).json
    thread = {"type": "continue", "previous_message_id": begun["id"]}

    got = post(app, MESSAGES, BODIES[MESSAGES] | {"thread": thread})

    assert got.status == 404
    assert got.json["error"]["details"] == {"error_code": "thread_not_found"}


def test_a_last_message_of_the_assistant_is_continued_and_no_other_can_be(app: App) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "hello"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}

    continued = answered(app, CHAT, messages=begun, **fields)

    assert continued.json["choices"][0]["message"]["content"] == " 0"
    for name, value in fields.items():
        got = post(app, CHAT, BODIES[CHAT] | {name: value})
        assert got.json["error"]["param"] == name
