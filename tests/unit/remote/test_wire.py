"""What servers are sent, and how what they stream is read, in the forms of their projects."""

import json
from array import array
from dataclasses import replace

import pytest

from kvchat.core.errors import GenerationError
from kvchat.core.types import CachedTokens, FinishReason, SamplingParams
from kvchat.engine.request import RequestSpec
from kvchat.remote.address import Address
from kvchat.remote.engine import _finished, _Sample
from kvchat.remote.exchange import ServerLost, refusal
from kvchat.remote.kinds import Kind, Server
from kvchat.remote.message_ids import Mark, text_ids
from kvchat.remote.wire import (
    CallPiece,
    Counts,
    Piece,
    Reader,
    error_sentence,
    request,
    tells_its_end,
)
from kvchat.server.api_errors import ended_server, response_to

SAMPLING = SamplingParams(
    0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.2, seed=2**40 + 3
)
IDS = RequestSpec((1, 2, 3), SAMPLING, 10, frozenset({9}))
TALK = RequestSpec(
    (Mark.USER, *text_ids("Hi"), Mark.THINK_OFF, Mark.ANSWER), SAMPLING, stop_token_ids=frozenset()
)


def server(kind: Kind, max_context: int = 100) -> Server:
    return Server(Address("http://localhost:1"), kind, "m", max_context=max_context)


def test_openai_gets_no_field_that_it_does_not_know() -> None:
    sent = request(server(Kind.OTHER), TALK, 1, takes_ids=False)

    assert sent.path == "/v1/chat/completions"
    assert sent.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 4,  # of 31 bits, and another one for each sample
        "reasoning_effort": "none",
    }


@pytest.mark.parametrize("kind", [Kind.LLAMA_CPP, Kind.VLLM, Kind.SGLANG, Kind.TENSORRT_LLM])
def test_a_template_is_told_whether_to_think(kind: Kind) -> None:
    body = request(server(kind), TALK, 0, takes_ids=False).body

    assert body is not None
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["min_p"] == 0.1


def test_llama_cpp_gets_ids_and_its_own_names() -> None:
    sent = request(server(Kind.LLAMA_CPP), IDS, 0, takes_ids=True, slot=2)

    assert sent.path == "/completion"
    assert sent.body is not None
    wanted = {
        "prompt": [1, 2, 3],
        "n_predict": 10,
        "id_slot": 2,
        "return_tokens": True,
        "top_k": 7,
        "repeat_penalty": 1.2,
    }
    assert wanted.items() <= sent.body.items()


def test_without_a_limit_an_answer_may_fill_the_context() -> None:
    spec = RequestSpec((1, 2, 3))

    assert (request(server(Kind.VLLM), spec, 0, True).body or {})["max_tokens"] == 97
    assert (request(server(Kind.LLAMA_CPP, 1 << 20), spec, 0, True).body or {})["n_predict"] == -1
    assert "max_tokens" not in (request(server(Kind.VLLM, 1 << 20), spec, 0, True).body or {})


def test_off_has_another_number_for_each_kind() -> None:
    spec = RequestSpec((1,), SamplingParams(top_k=0))

    assert (request(server(Kind.VLLM), spec, 0, True).body or {})["top_k"] == -1
    assert (request(server(Kind.LLAMA_CPP), spec, 0, True).body or {})["top_k"] == 0
    parameters = (request(server(Kind.SGLANG), spec, 0, True).body or {})["sampling_params"]
    assert parameters["top_k"] == -1


def test_tensorrt_llm_gets_only_fields_that_it_has() -> None:
    """Its requests forbid all others, `reasoning_effort` of `none` too."""
    body = request(server(Kind.TENSORRT_LLM), TALK, 0, takes_ids=False).body or {}

    own = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
    assert own.items() <= body.items()
    usual = {"model", "messages", "stream", "stream_options", "temperature", "top_p", "seed"}
    assert body.keys() == usual | own.keys() | {"chat_template_kwargs"}


def test_tgi_gets_no_top_p_that_leaves_out_nothing() -> None:
    def sent(top_p: float) -> dict[str, object]:
        spec = RequestSpec((Mark.USER, Mark.ANSWER), replace(SAMPLING, top_p=top_p))
        return request(server(Kind.TGI), spec, 0, takes_ids=False).body or {}

    assert "top_p" not in sent(1.0)
    assert sent(0.9)["top_p"] == 0.9
    assert not {"top_k", "min_p", "repetition_penalty"} & sent(0.9).keys()


def test_a_chat_chunk_is_read() -> None:
    reader = Reader(Kind.OTHER, takes_ids=False)
    call = {"index": 1, "function": {"name": "add", "arguments": '{"a"'}}
    delta = {"content": "Hi", "reasoning_content": "hm", "tool_calls": [call]}

    assert reader.read({"choices": [{"delta": delta, "finish_reason": None}]}) == Piece(
        text="Hi", thinking="hm", calls=(CallPiece(1, "add", '{"a"'),)
    )
    assert reader.read({"choices": [{"delta": {}, "finish_reason": "length"}]}).finish is (
        FinishReason.LENGTH
    )


def test_usage_tells_what_was_cached_or_that_it_does_not() -> None:
    reader = Reader(Kind.OTHER, takes_ids=False)
    usage = {"prompt_tokens": 9, "completion_tokens": 2}

    assert reader.read({"choices": [], "usage": usage}).counts == Counts(9, None, 2)
    told = {**usage, "prompt_tokens_details": {"cached_tokens": 4}}
    assert reader.read({"choices": [], "usage": told}).counts == Counts(9, CachedTokens(4), 2)
    tiers = {"cached_tokens": {"device": 1, "host": 2, "disk": 3, "total": 6}}
    own = {**told, "kvchat": tiers}
    assert reader.read({"choices": [], "usage": own}).counts == Counts(9, CachedTokens(1, 2, 3), 2)


def test_llama_cpps_progress_has_a_token_that_is_none() -> None:
    """It sent the id 0 with each report of progress, and it became a token of the answer."""
    reader = Reader(Kind.LLAMA_CPP, takes_ids=True)
    progress = {"total": 9, "cache": 4, "processed": 6, "time_ms": 1}

    piece = reader.read({"tokens": [0], "content": "", "prompt_progress": progress})

    assert piece == Piece(progress=(4, 6, 9))


def test_llama_cpps_end_has_the_figures() -> None:
    reader = Reader(Kind.LLAMA_CPP, takes_ids=True)
    timings = {"cache_n": 4, "prompt_n": 5, "predicted_n": 3}
    end = {"stop": True, "stop_type": "limit", "tokens_evaluated": 9, "id_slot": 1, "tokens": []}

    assert reader.read({**end, "timings": timings}) == Piece(
        slot=1, counts=Counts(9, CachedTokens(4), 3), finish=FinishReason.LENGTH
    )


@pytest.mark.parametrize("is_cumulative", [True, False])
def test_sglang_sends_all_ids_so_far_or_the_new_ones(is_cumulative: bool) -> None:
    reader = Reader(Kind.SGLANG, takes_ids=True)
    heard: list[int] = []
    for count in (1, 3):
        ids = [5, 6, 7][:count] if is_cumulative else [5, 6, 7][count // 3 : count]
        about = {"prompt_tokens": 4, "cached_tokens": 2, "completion_tokens": count}
        heard += reader.read({"output_ids": ids, "meta_info": about}).token_ids

    assert heard == [5, 6, 7]


def test_text_without_the_ids_that_were_asked_for_is_an_error() -> None:
    reader = Reader(Kind.VLLM, takes_ids=True)
    reader.read({"choices": [{"text": "Hi"}]})

    with pytest.raises(GenerationError, match="no token ids"):
        reader.read({"choices": [{"text": "", "finish_reason": "stop"}]})


@pytest.mark.parametrize(
    "document",
    [
        {"choices": [3]},
        {"choices": [{"token_ids": ["x"]}]},
        {"choices": [{"token_ids": [-1]}]},
        {"choices": {"delta": 1}},
        {"choices": [], "usage": "many"},
    ],
)
def test_a_form_that_is_not_known_is_one_error(document: dict[str, object]) -> None:
    with pytest.raises(GenerationError, match="unknown form"):
        Reader(Kind.VLLM, takes_ids=True).read(document)


@pytest.mark.parametrize(
    "error", [{"message": "no\x1b[31m room"}, "no\x1b[31m room", {"error": "no\x1b[31m room"}]
)
def test_an_error_of_the_server_is_told_and_cannot_act_on_a_terminal(error: object) -> None:
    with pytest.raises(GenerationError, match=r"no.*room") as caught:
        Reader(Kind.OTHER, takes_ids=False).read({"error": error})

    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("kind", [Kind.VLLM, Kind.SGLANG])
@pytest.mark.parametrize("takes_ids", [True, False])
def test_a_router_learns_which_conversation_it_is_and_not_its_name(kind, takes_ids):
    """vLLM and SGLang have a stable `session_id`, by which their routers keep a worker."""
    base = IDS if takes_ids else TALK
    named = [
        request(server(kind), replace(base, session_id=name), 0, takes_ids).body or {}
        for name in ("one", "one", "two", "")
    ]

    sessions = [body.get("session_id") for body in named]
    assert sessions[0] == sessions[1] != sessions[2]
    assert sessions[3] is None
    assert "one" not in str(sessions[0])


def test_other_kinds_get_no_session() -> None:
    named = replace(TALK, session_id="one")

    for kind in (Kind.OTHER, Kind.OLLAMA, Kind.TRANSFORMERS, Kind.LLAMA_CPP):
        assert "session_id" not in (request(server(kind), named, 0, False).body or {})


def test_sglang_tells_where_the_cached_tokens_were() -> None:
    about = {
        "id": "5f",
        "prompt_tokens": 90,
        "completion_tokens": 1,
        "cached_tokens": 70,
        "cached_tokens_details": {"device": 40, "host": 20, "storage": 10},
        "finish_reason": {"type": "stop", "matched": 9},
    }

    piece = Reader(Kind.SGLANG, takes_ids=True).read({"output_ids": [5], "meta_info": about})

    assert piece.counts == Counts(90, CachedTokens(40, 20, 10), 1)
    assert piece.finish is FinishReason.STOP


def test_an_answer_that_sglang_aborts_is_no_answer() -> None:
    """It was shown as complete: SGLang ends the stream in order, and tells the reason in it."""
    finish = {"type": "abort", "message": "Request is too long.", "status_code": 400}
    about = {"prompt_tokens": 9, "completion_tokens": 0, "finish_reason": finish}

    with pytest.raises(GenerationError, match=r"Request is too long\."):
        Reader(Kind.SGLANG, takes_ids=True).read({"output_ids": [], "meta_info": about})


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_vllm_gives_up_is_no_answer(reason: str) -> None:
    choice = {"index": 0, "text": "", "token_ids": [], "finish_reason": reason}

    with pytest.raises(GenerationError, match="gave up"):
        Reader(Kind.VLLM, takes_ids=True).read({"choices": [choice]})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"error": {"message": "No.", "type": "BadRequestError", "code": 400}}, "No"),  # vLLM
        ({"object": "error", "message": "No.", "type": "BadRequest", "code": 400}, "No"),  # SGLang
        ({"error": "no model"}, "no model"),  # ollama's own interface
        ({"detail": "Server is pinned."}, "Server is pinned"),  # transformers serve
        ({"detail": [{"loc": ["body"], "msg": "bad"}]}, '[{"loc": ["body"], "msg": "bad"}]'),
    ],
)
def test_each_projects_error_object_is_read(document: dict[str, object], words: str) -> None:
    assert error_sentence(document) == f"The server says: {words}."


def test_the_only_model_of_a_server_needs_no_name() -> None:
    """`transformers serve MODEL` refuses any other name, and does not tell its own."""
    asked = Server(Address("http://localhost:1"), Kind.TRANSFORMERS, "")
    body = request(asked, TALK, 0, takes_ids=False).body or {}

    assert "model" not in body
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"top_k", "min_p", "reasoning_effort"} & body.keys()  # it refuses unknown fields


@pytest.mark.parametrize(("last_s", "decode_s"), [(10.1009, 0.0), (10.2, 0.1)])
def test_tokens_that_come_together_have_no_rate(last_s: float, decode_s: float) -> None:
    """An answer that came in one piece had 21,928 tokens a second."""
    sample = _Sample(
        1, 0, IDS, 10.0, None, 3, first_s=10.1, last_s=last_s, ids=array("i", range(21))
    )

    timing = _finished(sample, FinishReason.STOP, takes_ids=True).timing

    assert timing.decode_s == pytest.approx(decode_s)
    assert timing.ttft_s == pytest.approx(0.1)


def test_each_kind_of_server_is_told_the_schema_of_an_answer() -> None:
    """A chat in a format would else get any text from a server in the place of its engine."""
    schema = {"type": "string"}
    talk, ids = (replace(spec, answer_schema=schema) for spec in (TALK, IDS))
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    for kind in Kind:
        assert (request(server(kind), talk, 0, takes_ids=False).body or {})[
            "response_format"
        ] == form
    for kind, name, value in (
        (Kind.KVCHAT, "response_format", form),
        (Kind.LLAMA_CPP, "json_schema", schema),
    ):
        assert (request(server(kind), ids, 0, takes_ids=True).body or {})[name] == value
    sglang = request(server(Kind.SGLANG), ids, 0, takes_ids=True).body or {}
    assert sglang["sampling_params"]["json_schema"] == '{"type": "string"}'


def test_an_answer_that_the_end_of_a_server_cut_off_is_one_that_broke_off() -> None:
    """Once servers told of it, the chat took it for an error of its request, and asked no other
    server.
    """
    said = response_to(ended_server(), "/v1/completions")

    assert isinstance(refusal(said.status_code, bytes(said.body)), ServerLost)
    assert tells_its_end(json.loads(bytes(said.body)))
    assert not tells_its_end({"error": "stopped"})
