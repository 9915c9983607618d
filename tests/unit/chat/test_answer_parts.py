"""AnswerParts: a stop text ends what the user reads, and nothing within thinking or a call."""

import itertools
import random
from dataclasses import dataclass

import pytest

from kvchat.chat.decoding import AnswerParts, AnswerWatcher, Decoding
from kvchat.chat.reply import AnswerLedger, Reply
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tool_calls import CALL_FORMATS, CallSplitter
from kvchat.chat.tools import ToolCall, ToolSet
from kvchat.core.events import SampleFinished, TokensGenerated
from kvchat.core.types import FinishReason, Timing, Usage
from support.tokenizer_zoo import byte_level, text_files

_TOOLS = ToolSet([{"name": "f", "parameters": {"type": "object"}}])
_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "STOP"}}\n</tool_call>'
_CHANNELS = (
    "<|channel|>analysis<|message|>so STOP<|end|><|start|>assistant<|channel|>final<|message|>"
)


@dataclass(frozen=True)
class Answer:
    """A text with what is to be read of it; `saved` is the beginning that is saved."""

    text: str
    thinking: str
    said: str
    stop: str | None
    saved: str
    num_calls: int = 0
    starts_thinking: bool = False
    form: str | None = None


ANSWERS = {
    "none": Answer("all of it", "", "all of it", None, "all of it"),
    "in the answer": Answer("a STOP b", "", "a ", "STOP", "a "),
    "in the thinking that the template began": Answer(
        "so STOP\n</think>\n\nyes STOP no",
        *("so STOP", "yes ", "STOP", "so STOP\n</think>\n\nyes "),
        starts_thinking=True,
    ),
    "in the thinking that the model began": Answer(
        "<think>STOP</think>yes", "STOP", "yes", None, "<think>STOP</think>yes"
    ),
    "in thinking without an end": Answer(
        "so STOP and", "so STOP and", "", None, "so STOP and", starts_thinking=True
    ),
    "in a channel of thinking": Answer(
        f"{_CHANNELS}yes STOP", "so STOP", "yes ", "STOP", f"{_CHANNELS}yes ", form="harmony"
    ),
    "in a call": Answer(_CALL, "", "", None, _CALL, 1, form="<tool_call>"),
    "behind a call": Answer(
        f"I look.\n{_CALL}\nSTOP more", "", "I look.", "STOP", "", 1, form="<tool_call>"
    ),
    "over a call": Answer(f"ST{_CALL}OP", "", "STOP", None, "", 1, form="<tool_call>"),
    "in what is no call": Answer(
        "<tool_call>no STOP</tool_call> x",
        *("", "<tool_call>no ", "STOP", "<tool_call>no "),
        form="<tool_call>",
    ),
    "half of it at the end": Answer("a STO", "", "a STO", None, "a STO"),
}


def new_calls(answer: Answer) -> CallSplitter | None:
    form = next((form for form in CALL_FORMATS if form.name == answer.form), None)
    return CallSplitter(form, _TOOLS) if form is not None else None


def pieces_of(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 9))))
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_stop_text_ends_what_the_user_reads_however_the_text_is_cut(answer: Answer) -> None:
    rng = random.Random(0)
    for _ in range(60):
        parts = AnswerParts(("STOP", "NEVER"), answer.starts_thinking, new_calls(answer))
        found = [part for piece in pieces_of(answer.text, rng) for part in parts.feed(piece)]
        certain = parts.num_certain
        found += parts.flush()

        texts = [part for part in found if not isinstance(part, ToolCall)]
        assert "".join(part.text for part in texts if part.is_thinking) == answer.thinking
        assert "".join(part.text for part in texts if not part.is_thinking) == answer.said
        assert sum(isinstance(part, ToolCall) for part in found) == answer.num_calls
        assert parts.stop == answer.stop
        assert certain <= parts.num_certain
        if answer.saved:
            assert answer.text[: parts.num_certain] == answer.saved
        if not answer.num_calls:
            assert all(answer.text[part.start : part.end] == part.text for part in texts)


TOKENIZER = ChatTokenizer(text_files(byte_level()))


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode_bare(text, is_first=False)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_engine_ends_an_answer_where_the_reader_does(answer: Answer) -> None:
    parts = AnswerParts(("STOP",), answer.starts_thinking, new_calls(answer))
    watcher = AnswerWatcher(TOKENIZER.new_stream([]), parts, {})

    ids = ids_of(answer.text)
    seen = [watcher.feed(token) for token in ids]

    assert any(seen) == (answer.stop is not None)
    if any(seen):
        read = TOKENIZER.decode(ids[: seen.index(True) + 1])
        assert answer.stop in read or "</tool_call>" in read  # what is no call shows at its end


class Remembering(AnswerLedger):
    """Remembers what it is given."""

    text = ""

    def extend_answer(self, sample: int, text: str, token_ids: list[int]) -> None:
        self.text += text

    def add_calls(self, sample: int, calls: tuple[ToolCall, ...], text: str) -> None:
        self.text = text


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_reply_tells_and_saves_what_stands_before_the_stop_text(answer, size):
    ledger = Remembering()
    how = Decoding(TOKENIZER.new_stream([]), ("STOP",), answer.starts_thinking, new_calls(answer))
    reply = Reply(ledger, [how], clock=lambda: 0.0)
    ids = ids_of(answer.text)
    for place in range(0, len(ids), size):
        reply.listen(TokensGenerated(1, 0, tuple(ids[place : place + size])))
    reply.listen(SampleFinished(1, 0, FinishReason.STOP, Usage(), Timing()))

    ended = reply.poll()[-1]

    assert (ended.thinking, ended.text) == (answer.thinking, answer.said)
    assert ended.stop_text == answer.stop
    assert ended.ends_in_thinking == (answer.starts_thinking and "</think>" not in answer.text)
    if answer.saved and not answer.num_calls:
        assert ledger.text == answer.saved


HIDDEN = next(token for token in range(2000) if TOKENIZER.is_hidden(token))


@pytest.mark.parametrize(
    ("before", "starts_thinking", "is_end"),
    [("hi", False, True), ("hm", True, False), ("hm</think>ok", True, True)],
)
def test_a_token_without_text_may_be_a_stop_text(before, starts_thinking, is_end):
    """Special tokens show no text, so a stop text that is one was never found."""
    name = TOKENIZER.token_bytes(HIDDEN).decode()
    parts = AnswerParts((name,), starts_thinking)
    watcher = AnswerWatcher(TOKENIZER.new_stream([]), parts, {HIDDEN: name})
    ids = [*ids_of(before), HIDDEN]

    assert [watcher.feed(token) for token in ids] == [*[False] * (len(ids) - 1), is_end]

    stream = TOKENIZER.new_stream([])
    how = Decoding(stream, (name,), starts_thinking, stop_tokens={HIDDEN: name})
    reply = Reply(Remembering(), [how])
    reply.listen(TokensGenerated(1, 0, tuple(ids)))
    reply.listen(SampleFinished(1, 0, FinishReason.STOP, Usage(), Timing()))
    assert reply.poll()[-1].stop_text == (name if is_end else None)
