"""Tool calls are found in answers, however the text arrives; what cannot be read stays text."""

import random

import pytest

from kvchat.chat.tool_calls import CALL_FORMATS, CallFormat, CallSplitter, Part, TextBesideCalls
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.errors import UsageError

FORMATS = {form.name: form for form in CALL_FORMATS}
TAG, LLAMA = FORMATS["<tool_call>"], FORMATS["llama"]
TOOLS = ToolSet(
    [
        {"name": "find", "parameters": {"properties": {"q": {"type": "string"}}}},
        {"name": "count", "parameters": {"properties": {"n": {"type": "integer"}}}},
    ]
)
FIND, COUNT = ToolCall("find", {"q": "12"}), ToolCall("count", {"n": 3})


def split(form: CallFormat, text: str, most: int | None = None) -> list[str | ToolCall]:
    splitter = CallSplitter(form, TOOLS, most)
    found = [*splitter.feed(text), *splitter.flush()]
    return [part if isinstance(part, ToolCall) else part.text for part in found]


_ARGUMENTS = '{"q": "12"}'
_OBJECT = f'{{"name": "find", "arguments": {_ARGUMENTS}}}'
_IN_TEXT = '{"name": "find", "arguments": "{\\"q\\": \\"12\\"}"}'
_DSML = "｜DSML｜"
WRITTEN = {
    "json between tags": (TAG, f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    "arguments as text": (TAG, f"<tool_call>{_IN_TEXT}</tool_call>"),
    "elements": (
        TAG,
        "<tool_call>\n<function=find>\n<parameter=q>\n12\n</parameter>\n</function>\n</tool_call>",
    ),
    "pairs": (
        TAG,
        "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
    ),
    "invoke": (
        FORMATS["<minimax:tool_call>"],
        '<minimax:tool_call>\n<invoke name="find">\n<parameter name="q">12</parameter>\n</invoke>'
        "\n</minimax:tool_call>",
    ),
    "dsml": (
        FORMATS[f"<{_DSML}function_calls>"],
        f'<{_DSML}function_calls>\n<{_DSML}invoke name="find">\n'
        f'<{_DSML}parameter name="q" string="true">12</{_DSML}parameter>\n'
        f"</{_DSML}invoke>\n</{_DSML}function_calls>",
    ),
    "a list": (FORMATS["<tool_calls>"], f"<tool_calls>[{_OBJECT}]</tool_calls>"),
    "braces": (FORMATS["gemma"], '<|tool_call>call:find{q:<|"|>12<|"|>}<tool_call|>'),
    "python": (FORMATS["python"], "<|tool_call_start|>[find(q='12')]<|tool_call_end|>"),
    "bare": (LLAMA, f'{{"name": "find", "parameters": {_ARGUMENTS}}}'),
    "python tag": (LLAMA, f"<|python_tag|>{_OBJECT}"),
    "a marked list": (FORMATS["mistral"], f"[TOOL_CALLS] [{_OBJECT}]"),
    "a marked name": (FORMATS["mistral"], f"[TOOL_CALLS]find[CALL_ID]abcdefghi[ARGS]{_ARGUMENTS}"),
    "a channel": (
        FORMATS["harmony"],
        f"<|channel|>commentary to=functions.find json<|message|>{_ARGUMENTS}",
    ),
    "a role": (
        FORMATS["harmony"],
        f"<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{_ARGUMENTS}",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_read_in_the_form_of_its_model(name: str) -> None:
    form, text = WRITTEN[name]

    assert split(form, text) == [FIND]


@pytest.mark.parametrize("name", WRITTEN)
def test_how_the_text_is_cut_makes_no_difference(name: str) -> None:
    form, text = WRITTEN[name]
    before = "" if form.is_first else "Let me <look> for it [now]. \n"
    random_ = random.Random(name)
    for _ in range(20):
        splitter = CallSplitter(form, TOOLS)
        found: list[Part] = []
        rest = before + text
        while rest:
            size = random_.randint(1, 7)
            found += splitter.feed(rest[:size])
            rest = rest[size:]
        found += splitter.flush()

        pieces = [part for part in found if isinstance(part, TextBesideCalls)]
        assert "".join(piece.text for piece in pieces) == before.rstrip()
        assert all(before.startswith(piece.text, piece.start) for piece in pieces)
        assert found[-1] == FIND


def test_several_calls_and_text_between_them_keep_their_order() -> None:
    one, two = (
        WRITTEN["pairs"][1],
        '<tool_call>{"name": "count", "arguments": {"n": 3}}</tool_call>',
    )

    assert split(TAG, f"{one}\n{two}") == [FIND, COUNT]
    assert split(TAG, f"a\n{one}\n\nb {two}\n") == ["a", FIND, "b", COUNT]


def test_each_text_says_where_it_stood() -> None:
    call = WRITTEN["pairs"][1]
    text = f"a \n{call}\n\nb{call}b <tool_call>[no</tool_call> c"
    splitter = CallSplitter(TAG, TOOLS)

    found = [*(part for c in text for part in splitter.feed(c)), *splitter.flush()]

    pieces = [part for part in found if isinstance(part, TextBesideCalls)]
    assert "".join(piece.text for piece in pieces) == "abb <tool_call>[no</tool_call> c"
    assert all(text.startswith(piece.text, piece.start) for piece in pieces)
    assert [piece.start for piece in pieces] == sorted({piece.start for piece in pieces})


def test_calls_beyond_the_limit_are_dropped_and_counted() -> None:
    call = WRITTEN["pairs"][1]
    splitter = CallSplitter(TAG, TOOLS, most=1)

    assert [*splitter.feed(call * 3), *splitter.flush()] == [FIND]
    assert splitter.num_dropped == 2


UNREADABLE = (
    "<tool_call>{not json}</tool_call>",
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
    "<tool_call>two words <arg_key>a</arg_key></tool_call>",
    '<tool_call>{"name": "find", "argum',
    "<tool_call>" + '{"a":' * 5000 + "</tool_call>",
    # Calls that no response and no file could be written with: they were a status 500.
    r'<tool_call>{"name": "find", "arguments": {"q": "\ud83d"}}</tool_call>',
    r'<tool_call>{"name": "find\ud83d", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "find", "arguments": {"q": NaN}}</tool_call>',
    '<tool_call>{"name": "find", "arguments": {"q": -Infinity}}</tool_call>',
    '<tool_call>{"name": "find", "arguments": {"q": ' + "9" * 5000 + "}}</tool_call>",
    '<tool_call>{"name": "find", "arguments": {"q": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
    "a < b and <tool",
)


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert "".join(str(part) for part in split(TAG, text)) == text


def test_braces_hold_values_of_all_types() -> None:
    text = '<|tool_call>call:f{a:-1.5,b:[true,{c:null}],d:<|"|>x: "y"\n<|"|>}<tool_call|>'

    [call] = split(FORMATS["gemma"], text)

    assert isinstance(call, ToolCall)
    assert call.arguments == {"a": -1.5, "b": [True, {"c": None}], "d": 'x: "y"\n'}


@pytest.mark.parametrize("inside", ["f(1)", "f(a=open('x'))", "f(**{})", "f(a={1})", "f(", "'f'"])
def test_python_that_is_no_plain_call_is_text_and_is_not_run(inside: str) -> None:
    text = f"<|tool_call_start|>[{inside}]<|tool_call_end|>"

    assert split(FORMATS["python"], text) == [text]


def test_json_that_calls_nothing_stays_text() -> None:
    """A model that writes bare calls may also be asked for JSON."""
    assert "".join(map(str, split(LLAMA, '{"answer": 4}'))) == '{"answer": 4}'
    later = 'See: {"name": "find", "parameters": {}}'
    assert "".join(map(str, split(LLAMA, later))) == later


def test_white_space_of_an_answer_without_calls_is_kept() -> None:
    assert "".join(map(str, split(TAG, "  a\n\nb  \n"))) == "  a\n\nb  \n"


def test_a_value_without_quotes_has_the_type_of_its_schema() -> None:
    text = (
        "<tool_call>count<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>"
        "<tool_call>find<arg_key>q</arg_key><arg_value>true</arg_value></tool_call>"
        "<tool_call>other<arg_key>x</arg_key><arg_value>[1, 2]</arg_value></tool_call>"
        "<tool_call>other<arg_key>x</arg_key><arg_value>null</arg_value></tool_call>"
        '<tool_call>other<arg_key>x</arg_key><arg_value>"quoted"</arg_value></tool_call>'
    )

    calls = [part for part in split(TAG, text) if isinstance(part, ToolCall)]

    values = [value for call in calls for value in call.arguments.values()]
    assert values == [3, "true", [1, 2], None, '"quoted"']


def test_a_definition_has_one_form_whatever_the_order_of_its_fields() -> None:
    one = ToolSet([{"parameters": {"a": 1}, "name": "x", "description": "y", "strict": True}])
    other = ToolSet([{"description": "y", "name": "x", "parameters": {"a": 1}}])

    assert one.text == other.text
    assert list(one.definitions[0]["function"]) == ["name", "description", "parameters"]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="same name"):
        ToolSet([{"name": "x"}, {"name": "x"}])
