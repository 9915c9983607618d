"""Logprobs of prompts beside transformers' own forward pass, as programs that score texts ask."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvchat.server import openai_api
from kvchat.server.guard import App
from support.asgi_client import Got, post
from support.checkpoints import save_checkpoint, tiny_model
from support.served import Serve, served_by
from support.stateful_models import STATEFUL
from support.tiny_host import tiny_host

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
STOP = 260
CONTEXT = [(37 * i) % 251 for i in range(90)]
CONTINUATIONS = [[65, 66, 67], [120], [3, STOP, 9, 9, 9, 200, 13]]
# The whole context of each is the same but for its end: from the second on, most of it is cached.
PROMPTS = [CONTEXT + continuation for continuation in CONTINUATIONS]

Scored = tuple[PreTrainedModel, App]


@pytest.fixture(scope="module", params=["llama", "gemma2", "lfm2"])
def scored(request, tmp_path_factory) -> Iterator[Scored]:
    """A model of transformers, and a server of the same weights; lfm2 has recurrent state."""
    model_type, settings = STATEFUL.get(request.param, (request.param, {}))
    model = tiny_model(model_type, **settings)
    host = tiny_host(save_checkpoint(tmp_path_factory.mktemp(request.param), model), None)
    host.wait_until_ready()
    with served_by(host) as app:
        yield model, app
    host.close()


def ask(app: App, prompt: object, **fields: Any) -> Got:
    got = post(app, TEXT, {"model": "scripted", "prompt": prompt, "temperature": 0, **fields})
    assert got.status == 200, got.json
    return got


def expected(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Return what transformers gives each of the ids but the first, [len(ids) - 1, vocab_size]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)


def test_each_token_has_the_logprob_that_transformers_gives_it(scored: Scored) -> None:
    """One request after another, so that the later ones find most of their prompt in the cache."""
    model, app = scored
    for prompt in PROMPTS:
        got = ask(app, prompt, echo=True, logprobs=3, max_tokens=0).json
        [choice] = got["choices"]
        told, right = choice["logprobs"], expected(model, prompt)

        assert choice["finish_reason"] == "length"
        assert got["usage"]["completion_tokens"] == 0
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert {len(column) for column in told.values()} == {len(prompt)}
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        own = right[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert told["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)
        likeliest = right.topk(3).values.tolist()
        for place, top in enumerate(told["top_logprobs"][1:]):
            assert list(top.values()) == pytest.approx(likeliest[place][: len(top)], abs=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_continuations_are_scored_as_an_evaluation_harness_does(scored, batch_size):
    """It asks for one token too many, cuts it off, and tells by the largest of the likeliest
    whether the continuation is what the model itself would say.
    """
    model, app = scored
    for start in range(0, len(PROMPTS), batch_size):
        batch = PROMPTS[start : start + batch_size]
        fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "seed": 1234}
        choices = ask(app, batch, **fields).json["choices"]

        assert [choice["index"] for choice in choices] == list(range(len(batch)))
        for prompt, choice in zip(batch, choices, strict=True):
            own = choice["logprobs"]["token_logprobs"][len(CONTEXT) : -1]
            top = choice["logprobs"]["top_logprobs"][len(CONTEXT) : -1]
            right = expected(model, prompt)[len(CONTEXT) - 1 :]
            following = torch.tensor(prompt[len(CONTEXT) :])
            right_own = right[torch.arange(len(following)), following]
            assert sum(own) == pytest.approx(float(right_own.sum()), abs=1e-3)
            is_greedy = all(one == max(t.values()) for one, t in zip(own, top, strict=True))
            assert is_greedy == (right.argmax(-1) == following).all()


def test_a_continuation_that_the_model_would_say_is_told_as_such(scored: Scored) -> None:
    _, app = scored
    [said] = ask(app, CONTEXT, max_tokens=8, return_token_ids=True, logit_bias={STOP: -100}).json[
        "choices"
    ]
    prompt = CONTEXT + said["token_ids"]

    [choice] = ask(app, prompt, echo=True, logprobs=1, max_tokens=1).json["choices"]

    columns = (
        choice["logprobs"][name][len(CONTEXT) :] for name in ("token_logprobs", "top_logprobs")
    )
    assert all(own == max(top.values()) for own, top in zip(*columns, strict=True))


def test_a_stop_token_after_the_prompt_has_its_entry(scored: Scored) -> None:
    """A harness cuts the last entry off: without that of the stop token it would lose another."""
    _, app = scored
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "logit_bias": {STOP: 100}}

    [choice] = ask(app, CONTEXT, **fields).json["choices"]

    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(CONTEXT) + 1
    assert choice["logprobs"]["tokens"][-1] == "<|eos|>"


def test_a_text_is_scored_with_its_places_in_it(scored: Scored) -> None:
    _, app = scored
    text = "häuser"

    first, second = ask(app, text, echo=True, logprobs=0, max_tokens=2, n=2).json["choices"]

    told = first["logprobs"]
    assert first["text"].startswith(text)
    assert told["tokens"][:4] == ["h", "bytes:\\xc3", "bytes:\\xa4", "u"]
    assert told["text_offset"][:6] == [0, 1, 1, 2, 3, 4]
    assert told["top_logprobs"][1:] == [{}] * (len(told["tokens"]) - 1)
    assert second["logprobs"]["token_logprobs"][:7] == told["token_logprobs"][:7]


def test_vllm_s_field_tells_them_by_ids(scored: Scored) -> None:
    model, app = scored
    [choice] = ask(app, PROMPTS[0], prompt_logprobs=2, max_tokens=1).json["choices"]

    right = expected(model, PROMPTS[0])
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert choice["logprobs"] is None
    assert len(others) == len(PROMPTS[0]) - 1
    for place, told in enumerate(others):
        token = PROMPTS[0][place + 1]
        assert told[str(token)]["logprob"] == pytest.approx(float(right[place, token]), abs=1e-4)
        ranks = {entry["rank"]: int(name) for name, entry in told.items()}
        assert [ranks[1], ranks[2]] == right[place].topk(2).indices.tolist()


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_begins_with_the_prompt_and_its_logprobs(scored: Scored, max_tokens: int) -> None:
    model, app = scored
    fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "logit_bias": {STOP: -100}}
    whole = ask(app, PROMPTS[0], **fields).json["choices"]

    stream = ask(app, PROMPTS[0], **fields, stream=True)
    choices = [chunk["choices"][0] for _, chunk in stream.events if chunk != "[DONE]"]

    first = choices[0]
    told, right = first["logprobs"], expected(model, PROMPTS[0])
    own = right[torch.arange(len(PROMPTS[0]) - 1), torch.tensor(PROMPTS[0][1:])]
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1:] == pytest.approx(own.tolist(), abs=1e-4)
    assert "".join(choice["text"] for choice in choices) == whole[0]["text"]
    assert choices[-1]["finish_reason"] == whole[0]["finish_reason"] == "length"
    columns = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    for name in ("tokens", "text_offset"):
        joined = [entry for column in columns for entry in column[name]]
        assert joined == whole[0]["logprobs"][name]


def test_a_stream_of_several_answers_begins_each_with_the_prompt(scored: Scored) -> None:
    _, app = scored
    stream = ask(app, "häuser", echo=True, logprobs=1, max_tokens=2, n=2, stream=True)

    begun = [chunk["choices"][0] for _, chunk in stream.events if chunk != "[DONE]"][:2]

    assert [choice["index"] for choice in begun] == [0, 1]
    assert [choice["text"] for choice in begun] == ["häuser"] * 2
    assert begun[0]["logprobs"] == begun[1]["logprobs"]


def test_a_chat_tells_the_logprobs_of_its_whole_context(scored: Scored) -> None:
    """Those of the template's marks too; beside the choices, as in vLLM."""
    model, app = scored
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Who lives here?"}],
        "max_tokens": 2,
        "temperature": 0,
        "prompt_logprobs": 2,
    }
    asked_once = post(app, CHAT, body).json
    got = post(app, CHAT, body | {"logprobs": True, "top_logprobs": 2}).json

    first, *others = got["prompt_logprobs"]
    assert first is None
    assert len(others) == got["usage"]["prompt_tokens"] - 1
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert asked_once["prompt_logprobs"] == got["prompt_logprobs"]
    assert asked_once["choices"][0]["logprobs"] is None
    assert len(got["choices"][0]["logprobs"]["content"]) == 2
    ids = [int(next(iter(told))) for told in others]  # the token itself is told first
    said = [told[str(own)]["decoded_token"] for told, own in zip(others, ids, strict=True)]
    assert "".join(said).startswith("<|start|>user\nWho lives here?<|end|>")
    right = expected(model, [model.config.bos_token_id, *ids])
    for place, (told, own) in enumerate(zip(others, ids, strict=True)):
        assert told[str(own)]["logprob"] == pytest.approx(float(right[place, own]), abs=1e-4)


@pytest.mark.parametrize(
    ("path", "fields", "form"),
    [
        (TEXT, {"prompt": "x", "prompt_logprobs": 2}, "of_prompt"),
        (TEXT, {"prompt": "x", "echo": True, "logprobs": 2}, "echoed"),
        (TEXT, {"prompt": "x", "echo": True, "logprobs": 2, "stream": True}, "echoed"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 2}, "of_prompt"),
    ],
)
def test_logprobs_of_prompts_are_written_while_the_event_loop_goes_on(
    scored: Scored, path: str, fields: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 4,000 tokens, 20 for each, stopped all other streams for half a second."""
    whole, threads = getattr(openai_api, form), []

    def noted(*parts: Any) -> Any:
        threads.append(threading.current_thread())
        return whole(*parts)

    monkeypatch.setattr(openai_api, form, noted)
    got = post(scored[1], path, {"model": "scripted", "max_tokens": 1, **fields})

    assert got.status == 200
    assert threads
    assert threading.current_thread() not in threads


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a stream for vLLM's field": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "two numbers": ({"prompt_logprobs": 1, "logprobs": 2}, "prompt_logprobs"),
    "too many": ({"prompt_logprobs": 21}, "prompt_logprobs"),
    "several prompts in a stream": ({"prompt": ["a", "b"], "stream": True}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 129}, "prompt"),
    "too many answers": ({"prompt": ["a"] * 128, "n": 9}, "n"),
    "prompts of prompts": ({"prompt": [["a"]]}, "prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_told_is_refused(serve: Serve, name: str) -> None:
    fields, param = BAD[name]

    got = post(serve(), TEXT, {"model": "scripted", "prompt": "x", **fields})

    assert (got.status, got.json["error"]["param"]) == (400, param)


def test_one_bad_prompt_is_told_for_all(serve: Serve) -> None:
    got = post(serve(), TEXT, {"model": "scripted", "prompt": ["one", "", "two"]})

    assert got.status == 400
    assert got.json["error"]["message"] == "The prompt is empty."
