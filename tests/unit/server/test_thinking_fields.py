"""How much a model thinks: each interface's field reaches the switch of the model's template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvchat.chat.chat_model import ChatModel
from support import template_zoo as zoo
from support.asgi_client import Got, post
from support.scripted_engine import text_model, write_text_checkpoint
from support.served import Serve

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
EMPTY_THOUGHT = len("<think>\n\n</think>\n\n")
# The marks are one token each.
EMPTY_TOKENS = EMPTY_THOUGHT - len("<think></think>") + 2

Toggled = Callable[[str], ChatModel]


@pytest.fixture(scope="module")
def toggled(tmp_path_factory: pytest.TempPathFactory) -> Toggled:
    """Return a function that returns a model with a template of the zoo."""

    def model(template: str) -> ChatModel:
        directory: Path = tmp_path_factory.mktemp("toggled") / "scripted"
        return text_model(write_text_checkpoint(directory, template.replace("<|im_", "<|")))

    return model


def ask(app: Any, path: str, **fields: Any) -> Got:
    base: dict[str, Any] = {"model": "scripted"}
    if path == RESPONSES:
        return post(app, path, base | {"input": "x"} | fields)
    messages = [{"role": "user", "content": "x"}]
    return post(app, path, base | {"messages": messages, "max_tokens": 50} | fields)


def prompt_tokens(got: Got) -> int:
    usage = got.json["usage"]
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens", 0))


@pytest.mark.parametrize(
    ("path", "off", "on"),
    [
        (CHAT, {"reasoning_effort": "none"}, {"reasoning_effort": "high"}),
        (RESPONSES, {"reasoning": {"effort": "none"}}, {"reasoning": {"effort": "low"}}),
        (
            MESSAGES,
            {"thinking": {"type": "disabled"}},
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        ),
    ],
)
def test_each_interface_switches_thinking(serve, toggled, path, off, on):
    app = serve(served=toggled(zoo.TOGGLED))

    plain, without, thinking = (prompt_tokens(ask(app, path, **f)) for f in ({}, off, on))

    assert thinking == plain
    assert without == plain + EMPTY_TOKENS


def test_an_effort_reaches_a_template_that_knows_efforts(serve: Serve, toggled: Toggled) -> None:
    app = serve(served=toggled(zoo.EFFORT))

    high, low, nothing, medium = (
        prompt_tokens(ask(app, CHAT, reasoning_effort=effort))
        for effort in ("high", "low", "minimal", "medium")
    )

    assert high - low == len("high") - len("low")
    assert nothing == low
    assert medium - low == len("medium") - len("low")


def test_a_template_without_a_switch_ignores_the_field(serve: Serve) -> None:
    app = serve()

    plain = prompt_tokens(ask(app, CHAT))

    assert prompt_tokens(ask(app, CHAT, reasoning_effort="none")) == plain
    assert prompt_tokens(ask(app, MESSAGES, thinking={"type": "enabled"})) == plain


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"reasoning_effort": "very"}, "reasoning_effort"),
        (CHAT, {"reasoning_effort": 3}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "very"}}, "reasoning.effort"),
        (MESSAGES, {"thinking": {"type": "on"}}, "thinking.type"),
        (MESSAGES, {"thinking": "perhaps"}, "thinking"),
    ],
)
def test_a_bad_value_names_its_field(serve, path, fields, param):
    got = ask(serve(), path, **fields)

    assert got.status == 400
    assert param in got.json["error"]["message"]


@pytest.mark.parametrize("later", ["none", "high", None])
def test_a_history_that_was_asked_otherwise_keeps_its_ids(serve, toggled, later):
    """What was fed holds an empty thought before the answer. Asked again with another effort, or
    none, all from there on was read again.
    """
    app = serve(served=toggled(zoo.TOGGLED))
    question = {"role": "user", "content": "a question " * 5}
    first = ask(app, CHAT, messages=[question], reasoning_effort="none")
    answer = first.json["choices"][0]["message"]["content"]
    messages = [
        question,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "y"},
    ]

    got = ask(app, CHAT, messages=messages, reasoning_effort=later)

    usage = got.json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > prompt_tokens(first) + len(answer) - 16, "all but an incomplete block"


KWARGS = "chat_template_kwargs"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {KWARGS: {"enable_thinking": False}}),
        (CHAT, {KWARGS: {"thinking": False}}),
        (CHAT, {KWARGS: {"reasoning_effort": "none"}}),
        (CHAT, {"enable_thinking": False}),
        (CHAT, {"thinking_budget": 0}),
        (CHAT, {"think": False}),
        (CHAT, {"thinking": {"type": "disabled"}}),
        (CHAT, {"reasoning": {"effort": "none"}}),
        (CHAT, {"reasoning": {"enabled": False}}),
        (RESPONSES, {KWARGS: {"enable_thinking": False}}),
        (MESSAGES, {KWARGS: {"enable_thinking": False}}),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "none"}}),
    ],
)
def test_the_switches_of_other_servers_switch_thinking(serve, toggled, path, fields):
    """They were ignored, and the model thought."""
    app = serve(served=toggled(zoo.TOGGLED))

    assert prompt_tokens(ask(app, path, **fields)) == prompt_tokens(ask(app, path)) + EMPTY_TOKENS


def test_the_interfaces_own_field_counts_more_than_another_servers(serve, toggled):
    app = serve(served=toggled(zoo.TOGGLED))

    got = ask(app, CHAT, reasoning_effort="high", enable_thinking=False)

    assert prompt_tokens(got) == prompt_tokens(ask(app, CHAT))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({KWARGS: {"date_string": "today"}}, f"{KWARGS}.date_string"),
        ({KWARGS: 1}, KWARGS),
        ({"enable_thinking": "perhaps"}, "enable_thinking"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
def test_a_bad_switch_is_refused_by_its_name(serve, fields, param):
    got = ask(serve(), CHAT, **fields)

    assert got.status == 400
    assert got.json["error"]["param"] == param
