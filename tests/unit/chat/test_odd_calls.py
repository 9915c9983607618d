"""Calls as models really write them: a value with tags in it, a tag left out, a fenced object.

A value is read whole or there is no call: a file that was written with half of its text is worse
than an answer that shows the call.
"""

import json
import random
from typing import Any

import pytest

from kvchat.chat.tool_calls import CALL_FORMATS, CallFormat, CallSplitter, TextBesideCalls
from kvchat.chat.tools import ToolCall, ToolSet

FORMATS = {form.name: form for form in CALL_FORMATS}
TAG, LLAMA, HARMONY = FORMATS["<tool_call>"], FORMATS["llama"], FORMATS["harmony"]
TEXT = {"type": "string"}
TOOLS = ToolSet(
    [
        {"name": "save", "parameters": {"properties": {"text": TEXT, "path": TEXT}}},
        {"name": "read_file", "parameters": {"properties": {"path": TEXT}}},
    ]
)
Split = list[str | ToolCall]


def split(form: CallFormat, text: str) -> Split:
    """Return the parts of an answer, which are the same however it is cut."""
    whole = _parts(form, [text])
    random_ = random.Random(text)
    for pieces in (list(text), _cut(text, random_), _cut(text, random_)):
        assert _parts(form, pieces) == whole
    return whole


def _parts(form: CallFormat, pieces: list[str]) -> Split:
    splitter = CallSplitter(form, TOOLS)
    found = [*(part for piece in pieces for part in splitter.feed(piece)), *splitter.flush()]
    joined: Split = []
    for part in found:
        if isinstance(part, ToolCall):
            joined.append(part)
        elif joined and isinstance(joined[-1], str):
            joined[-1] += part.text
        else:
            joined.append(part.text)
    text = "".join(pieces)
    texts = [part for part in found if isinstance(part, TextBesideCalls)]
    assert all(text.startswith(part.text, part.start) for part in texts)
    return joined


def _cut(text: str, random_: random.Random) -> list[str]:
    pieces = []
    while text:
        size = random_.randint(1, 9)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def save(text: str, **others: Any) -> ToolCall:
    return ToolCall("save", {"text": text, **others})


# Each form with a place for a value.
ELEMENTS = "<tool_call>\n<function=save>\n{}</function>\n</tool_call>"
WRITERS: dict[str, tuple[CallFormat, Any]] = {
    "elements": (TAG, lambda v: ELEMENTS.format(f"<parameter=text>\n{v}\n</parameter>\n")),
    "seed": (
        FORMATS["<seed:tool_call>"],
        lambda v: (
            f"<seed:tool_call>\n<function=save>\n<parameter=text>{v}</parameter>\n"
            "</function>\n</seed:tool_call>"
        ),
    ),
    "minimax": (
        FORMATS["<minimax:tool_call>"],
        lambda v: (
            f'<minimax:tool_call>\n<invoke name="save">\n<parameter name="text">{v}</parameter>\n'
            "</invoke>\n</minimax:tool_call>"
        ),
    ),
    "dsml": (
        FORMATS["<｜DSML｜function_calls>"],
        lambda v: (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="save">\n'
            f'<｜DSML｜parameter name="text" string="true">{v}</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        ),
    ),
    "pairs": (
        TAG,
        lambda v: (
            f"<tool_call>save\n<arg_key>text</arg_key>\n<arg_value>{v}</arg_value>\n</tool_call>"
        ),
    ),
    "json": (
        TAG,
        lambda v: (
            f'<tool_call>\n{{"name": "save", "arguments": {json.dumps({"text": v})}}}\n</tool_call>'
        ),
    ),
    "braces": (
        FORMATS["gemma"],
        lambda v: f'<|tool_call>call:save{{text:<|"|>{v}<|"|>}}<tool_call|>',
    ),
    "python": (
        FORMATS["python"],
        lambda v: f"<|tool_call_start|>[save(text={v!r})]<|tool_call_end|>",
    ),
    "marked names": (
        FORMATS["mistral"],
        lambda v: f"[TOOL_CALLS]save[ARGS]{json.dumps({'text': v})}",
    ),
}
VALUES = (
    'x = "</parameter>"\ny = 1',
    "<parameter=path>\nevil\n</parameter>",
    '<parameter name="path">evil</parameter>',
    "</function>",
    "</tool_call> and </function>",
    "a </arg_value> b </minimax:tool_call> c </seed:tool_call> d <|tool_call_end|>",
    "<arg_key>path</arg_key>\n<arg_value>evil</arg_value>",
    "the letters ｜DSML｜ and </｜DSML｜parameter> too",
    "<tool_call>\n<function=save>\n<parameter=text>\nb\n</parameter>\n</function>\n</tool_call>",
    '<invoke name="x">\n<parameter name="y">z</parameter>\n</invoke>\n</minimax:tool_call>',
    "[TOOL_CALLS]save[ARGS]{}",
    "<tool_call|>",
)


@pytest.mark.parametrize("name", WRITERS)
def test_a_value_with_tags_in_it_is_whole(name: str) -> None:
    form, write = WRITERS[name]
    for value in VALUES:
        assert split(form, f"I save.\n{write(value)}\nDone.") in (
            ["I save.", save(value), "Done."],
            [f"I save.\n{write(value)}\nDone."],  # the last form takes nothing behind its calls
        ), value


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "marked names"])
def test_the_call_behind_such_a_one_is_found_too(name: str) -> None:
    form, write = WRITERS[name]
    for value in VALUES:
        assert split(form, write(value) + "\n" + write("b")) == [save(value), save("b")], value


# What can be read in two ways, or ends too early.
UNCLEAR = (
    "<parameter=text>\na\n<parameter=path>\nb\n</parameter>\n",
    "<parameter=text>\na\n</parameter>\n<parameter=text>\nb\n</parameter>\n",
    "<parameter=text>\nuse <parameter=x> here\n</parameter>\n",
)


@pytest.mark.parametrize("arguments", UNCLEAR)
def test_what_is_unclear_is_no_call(arguments: str) -> None:
    text = ELEMENTS.format(arguments)

    assert split(TAG, text) == [text]
    assert split(TAG, f"{text}\n{ELEMENTS.format('')}") == [text, ToolCall("save", {})]


def test_one_that_cannot_be_read_stops_no_later_call() -> None:
    bad = '<tool_call>{"name": "save", "arguments": {"text": "a}}</tool_call>'
    good = '<tool_call>{"name": "save", "arguments": {"text": "b"}}</tool_call>'

    assert split(TAG, f"{bad}\n{good}") == [bad, save("b")]


INNER = "<function=save>\n<parameter=text>\na\n</parameter>\n</function>"
LEFT_OUT: dict[str, tuple[str, Split]] = {
    "the opener": (f"I look.\n\n{INNER}\n</tool_call>", ["I look.", save("a")]),
    "both marks": (f"I look.\n\n{INNER}\n\nWell.", ["I look.", save("a"), "Well."]),
    "two without openers": (f"{INNER}\n</tool_call>\n{INNER}", [save("a"), save("a")]),
    "the closer": (f"<tool_call>\n{INNER}", [save("a")]),
    "a part of the closer": (f"<tool_call>\n{INNER}\n</tool_c", [save("a")]),
    "the function's end": (
        "<tool_call>\n<function=save>\n<parameter=text>\na\n</parameter>\n</tool_call>",
        [save("a")],
    ),
    "the parameter's end": (ELEMENTS.format("<parameter=text>\na\n"), [save("a")]),
    "a mark in the value": (
        "<function=save>\n<parameter=text>\n</function>\n</tool_call>\n</parameter>\n</function>",
        [save("</function>\n</tool_call>")],
    ),
    "the end of json's closer": (
        '<tool_call>\n{"name": "save", "arguments": {"text": "a"}}\n</tool_',
        [save("a")],
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_call_is_found_though_a_tag_is_left_out(name: str) -> None:
    text, parts = LEFT_OUT[name]

    assert split(TAG, text) == parts


PROSE = (
    "Write <function=save> to begin a call.",
    "Write <function=save>\nand then an argument.",
    "<function=other>\n<parameter=text>\na\n</parameter>\n</function>",
    "An <invoke name=",
    "I look. <tool_call> is the mark.",
)


@pytest.mark.parametrize("text", PROSE)
def test_prose_about_calls_is_text(text: str) -> None:
    assert split(TAG, text) == [text]


def test_prose_about_a_call_is_not_withheld() -> None:
    splitter = CallSplitter(TAG, TOOLS)

    parts = splitter.feed("Write <function=save> to ")

    assert [part.text for part in parts if isinstance(part, TextBesideCalls)] == [
        "Write <function=save> to"
    ]


_RAW = '{"text": "a\n\tb"}'
RAW: dict[str, tuple[CallFormat, str]] = {
    "tags": (TAG, f'<tool_call>\n{{"name": "save", "arguments": {_RAW}}}\n</tool_call>'),
    "twice encoded": (
        TAG,
        '<tool_call>{"name": "save", "arguments": "{\\"text\\": \\"a\n\tb\\"}"}</tool_call>',
    ),
    "a marked list": (
        FORMATS["mistral"],
        f'[TOOL_CALLS] [{{"name": "save", "arguments": {_RAW}}}]',
    ),
    "a marked name": (FORMATS["mistral"], f"[TOOL_CALLS]save[ARGS]{_RAW}"),
    "bare": (LLAMA, f'{{"name": "save", "parameters": {_RAW}}}'),
    "a channel": (HARMONY, f"<|channel|>commentary to=functions.save<|message|>{_RAW}"),
    "a channel without functions": (HARMONY, f"<|channel|>commentary to=save<|message|>{_RAW}"),
    "a channel and its end": (
        HARMONY,
        f"<|channel|>commentary to=functions.save <|constrain|>json<|message|>{_RAW}<|call|>",
    ),
    "a fence": (TAG, f'```json\n{{"name": "save", "arguments": {_RAW}}}\n```'),
}


@pytest.mark.parametrize("name", RAW)
def test_line_ends_and_tabs_may_stand_in_strings(name: str) -> None:
    form, text = RAW[name]

    assert split(form, text) == [save("a\n\tb")]


def test_a_channel_to_a_tool_that_is_not_offered_is_no_call() -> None:
    text = "<|channel|>commentary to=browser.search<|message|>{}"

    assert split(HARMONY, text) == [text]


READ = ToolCall("read_file", {"path": "a.py"})
OBJECT = '{"name": "read_file", "arguments": {"path": "a.py"}}'
SPACED = '{\n  "name": "read_file",\n  "arguments": {\n    "path": "a.py"\n  }\n}'
FENCED: dict[str, tuple[str, Split]] = {
    "alone": (f"```json\n{OBJECT}\n```", [READ]),
    "over several lines": (f"```\n{SPACED}\n```\n", [READ]),
    "between prose": (
        f"I read it first.\n\n```json\n{SPACED}\n```\n\nThen I answer.",
        ["I read it first.", READ, "Then I answer."],
    ),
    "without a fence": (f"I read it.\n{OBJECT}", ["I read it.", READ]),
    "alone and bare": (SPACED, [READ]),
    "with a tag in its text": (
        '```json\n{"name": "read_file", "arguments": {"path": "<tool_call>"}}\n```',
        [ToolCall("read_file", {"path": "<tool_call>"})],
    ),
}


@pytest.mark.parametrize("form", [TAG, FORMATS["gemma"], LLAMA])
@pytest.mark.parametrize("name", FENCED)
def test_an_object_that_names_an_offered_tool_is_a_call(name: str, form: CallFormat) -> None:
    text, parts = FENCED[name]

    assert split(form, text) == parts


EXAMPLES = (
    f"```json\n{OBJECT.replace('read_file', 'other')}\n```",
    f"```json\n{OBJECT}\n```\n\nor\n\n```json\n{OBJECT}\n```",
    f"```python\nprint(1)\n```\n\n```json\n{OBJECT}\n```",
    f"```json\n{OBJECT}\n```\n\nRun `ls`:\n\n```sh\nls\n```",
    f"{OBJECT}\n{OBJECT}",
    f"Write `{OBJECT}` for a call.",
    '```json\n{"name": "read_file", "version": "1.0"}\n```',
    '```json\n{"name": "read_file"}\n```',
    '```json\n{"name": "read_file", "arguments": {"path": "a.py',
    '```json\n{"name": "read_file", "arguments": {"path": }}\n```',
    f"```json\n[{OBJECT}]\n```",
    f"```json\n{OBJECT} and more\n```",
)


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_object_beside_more_than_prose_is_text(text: str) -> None:
    assert split(TAG, text) == [text]


def test_a_call_in_the_models_own_form_makes_the_object_an_example() -> None:
    example = f"Such a call:\n```json\n{OBJECT}\n```\nNow:"

    found = split(TAG, f"{example}\n<tool_call>\n{OBJECT}\n</tool_call>")

    assert found == [example, READ]


def test_other_objects_are_not_withheld() -> None:
    splitter = CallSplitter(TAG, TOOLS)

    parts = splitter.feed('Here:\n```json\n{"name": "my-package", "vers')

    assert "".join(part.text for part in parts if isinstance(part, TextBesideCalls)).endswith(
        "vers"
    )


MARKS = (
    *("<tool_call>", "</tool_call>", "<function=save>", "</function>", "<parameter=text>"),
    *("</parameter>", '<invoke name="save">', "</invoke>", "<function=", "<arg_key>text</arg_key>"),
    *("<arg_value>", "</arg_value>", '{"name": "save", "arguments": {"text": "', '"}}', "{}"),
    *("```json\n", "\n```", "`", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>"),
    *('call:save{text:<|"|>', '<|"|>}', "<|tool_call_start|>", '[save(text="', '")]', "save"),
    *("<|tool_call_end|>", "<|python_tag|>", " to=functions.save", "<|message|>", "a", " ", "\n"),
)


@pytest.mark.parametrize("form", CALL_FORMATS, ids=lambda form: form.name)
def test_random_texts_are_split_alike_however_they_are_cut(form: CallFormat) -> None:
    random_ = random.Random(form.name)
    for _ in range(60):
        split(form, "".join(random_.choices(MARKS, k=random_.randint(1, 12))))
