"""A chat template is bounded: whatever it does costs seconds and a sentence, never the machine.

The plain twin renders in this process, with nothing around it.
"""

import os
import select
import signal
import subprocess
import threading
from datetime import datetime

import pytest

from kvchat.chat import template_process
from kvchat.chat.template import turn_format
from kvchat.chat.template_child import compile_template
from kvchat.chat.template_process import RenderingFailed, TemplateProcess
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import ModelError, TimedOut
from support import template_zoo as zoo
from support.tokenizer_zoo import byte_level, text_files

CLOCK = datetime(2026, 2, 3, 4, 5, 6)
MESSAGES = [
    {"role": "system", "content": "Be \u00e9 \u597d \ud800."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "  And\nyou?  "},
]
NAMES: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "flag": True, "list": [1]}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# One second of a template is one second of a test: most bombs are of the cheap kinds.
BOMBS = {
    "nested parentheses": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "Recursion|ended|nested"),
    "nested blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "Recursion|ended|nested"),
    "long sum": ("{{ " + "1 + " * 20_000 + "1 }}", "Recursion|ended|nested"),
    "huge string": ("{{ 'a' * 10 ** 10 }}", "memory"),
    "huge output": ("{{ 'a' * 3000000 }}", "writes more than 1 MiB"),
    "much output": (
        "{% for i in range(9999) %}{{ 'abcdefghij' * 1000 }}{% endfor %}",
        "writes more than 1 MiB|memory",
    ),
    "doubling": (
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "memory|takes longer",  # a busy machine may reach the other limit first
    ),
    "wide format": ("{{ '%9999999999d' % 1 }}", "memory|Memory|Overflow|Value"),
    "wide filter": ("{{ 'a' | center(9999999999) }}", "memory|Memory|Overflow"),
    "huge power": ("{{ 9 ** (9 ** 9) }}", "takes longer|memory"),
    "macro": ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "include itself": ("{% include 'x' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "undefined": ("{{ nothing.at.all }}", "undefined"),
    "internals": ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
    "exit": ("{{ raise_exception('no\nmore') }}", "no more"),
}


@pytest.fixture(params=sorted(BOMBS))
def bomb(request: pytest.FixtureRequest) -> tuple[str, str]:
    return BOMBS[request.param]


def test_a_template_out_of_bounds_is_refused_in_a_sentence(bomb, monkeypatch):
    """A deep one ended kvchat with a traceback, and one that wrote gigabytes was killed."""
    source, reason = bomb
    if "longer" in reason:
        monkeypatch.setattr(template_process, "_CPU_LIMIT_S", 0.3)
    files = text_files(byte_level(), source)

    with pytest.raises(ModelError, match=reason) as raised:
        turn_format(files, ChatTokenizer(files))

    assert "\n" not in raised.value.message
    assert raised.value.message.startswith("The checkpoint's chat template ")


def test_an_endless_template_is_ended_and_the_next_rendering_works(monkeypatch):
    monkeypatch.setattr(template_process, "_CPU_LIMIT_S", 0.3)
    process = TemplateProcess("{% if flag %}" + ENDLESS + "{% endif %}{{ messages | length }}")

    with pytest.raises(RenderingFailed, match=r"longer than 0\.3 s"):
        process.render(MESSAGES, NAMES, CLOCK)

    assert process.render(MESSAGES, {"flag": False}, CLOCK) == "4"


def test_the_users_limit_counts_where_it_is_the_shorter_one() -> None:
    process = TemplateProcess(ENDLESS, limit_s=0.05)

    with pytest.raises(TimedOut, match=r"longer than 0\.05 s"):
        process.render(MESSAGES, NAMES, CLOCK)


@pytest.mark.parametrize(
    "name", [name for name, value in vars(zoo).items() if name.isupper() and isinstance(value, str)]
)
def test_a_process_renders_what_its_plain_twin_renders(name: str) -> None:
    source = getattr(zoo, name)
    plain, process = compile_template(source), TemplateProcess(source)
    process.compile()
    try:
        expected = plain.render(MESSAGES, NAMES, CLOCK, add_generation_prompt=True)
    except Exception as error:
        with pytest.raises(RenderingFailed, match=str(error)):
            process.render(MESSAGES, NAMES, CLOCK)
    else:
        assert process.render(MESSAGES, NAMES, CLOCK) == expected


def test_the_process_that_users_have_renders_and_is_limited(monkeypatch):
    """In all other tests it is a fork of one that has imported Jinja."""
    monkeypatch.setattr(template_process, "subprocess", subprocess)
    process = TemplateProcess("{% if flag %}{{ 'a' * 10 ** 10 }}{% endif %}{{ messages | length }}")

    with pytest.raises(RenderingFailed, match="memory"):
        process.render(MESSAGES, NAMES, CLOCK)

    assert process.render(MESSAGES, {"flag": False}, CLOCK) == "4"


def test_a_process_that_was_killed_is_started_again() -> None:
    process = TemplateProcess(zoo.CHATML)
    first = process.render(MESSAGES, NAMES, CLOCK)
    assert process._child is not None
    os.kill(process._child._process.pid, signal.SIGKILL)
    process._child._process.wait()

    assert process.render(MESSAGES, NAMES, CLOCK) == first


def test_threads_share_a_process() -> None:
    process = TemplateProcess("{{ messages[0].content }}")
    texts = [f"text {i}" for i in range(24)]
    found: dict[str, str] = {}

    def render(text: str) -> None:
        found[text] = process.render([{"role": "user", "content": text}], {}, CLOCK)

    threads = [threading.Thread(target=render, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == {text: text for text in texts}


def test_the_process_ends_with_what_it_renders_for() -> None:
    """The thread that sent the template may be the last that knows it, and end a little later."""
    process = TemplateProcess(zoo.CHATML)
    process.compile()
    assert process._child is not None
    ending = os.pidfd_open(process._child._process.pid)
    assert not select.select([ending], [], [], 0.0)[0]

    del process

    assert select.select([ending], [], [], 60.0)[0]
    os.close(ending)
