"""The tokens of a shown text: together they have its bytes, whatever cuts and hides the text."""

import random

import pytest

from kvchat.chat.decoding import Decoding
from kvchat.chat.events import AnswerCall, LogprobTrack, ShownToken
from kvchat.chat.reply import AnswerLedger, Reply
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.chat.tool_calls import CALL_FORMATS, CallSplitter
from kvchat.chat.tools import ToolSet
from kvchat.core.events import SampleFinished, TokensGenerated
from kvchat.core.types import FinishReason, Timing, TokenLogprobs, Usage
from support.tokenizer_zoo import END, ZOO, byte_fallback, byte_level, text_files, unigram

KINDS = {"byte level": byte_level, "byte fallback": byte_fallback, "unigram": unigram}
TEXTS = ["a the héllo 好 👍🏽 ab", "👍", "x" * 30, " two  spaces \n lines", "é é é"]


Told = tuple[str, bytes]


def tell(
    tokenizer: ChatTokenizer,
    ids: list[int],
    rng: random.Random,
    stops: tuple[str, ...] = (),
    starts_thinking: bool = False,
    calls: CallSplitter | None = None,
) -> tuple[Told, Told]:
    """Return the answer and the thinking, each with the joined bytes of its tokens.

    The answer follows the token of a letter: some decoders drop a space at the front of a text.
    Also checks that the events of the stream tell the same as the end.
    """
    parts = Decoding(
        tokenizer.new_stream(tokenizer.encode_bare("b", is_first=False)),
        stops,
        starts_thinking,
        calls,
        LogprobTrack(tokenizer),
    )
    reply = Reply(AnswerLedger(), [parts])
    left = [TokenLogprobs(token, -float(place)) for place, token in enumerate(ids)]
    while left:
        size = rng.randint(1, 4)
        some, left = tuple(left[:size]), left[size:]
        reply.listen(TokensGenerated(1, 0, tuple(each.token_id for each in some), some))
    reply.listen(SampleFinished(1, 0, FinishReason.STOP, Usage(), Timing()))
    *events, ended = reply.poll()
    streamed = [event for event in events if not isinstance(event, AnswerCall)]
    for is_thinking, tokens in ((False, ended.logprobs), (True, ended.thinking_logprobs)):
        told = [t for e in streamed if e.is_thinking == is_thinking for t in e.logprobs]
        assert told == list(tokens)
        assert len({token.logprob for token in tokens}) == len(tokens), "a token was told twice"
    return (ended.text, joined(ended.logprobs)), (ended.thinking, joined(ended.thinking_logprobs))


def joined(tokens: tuple[ShownToken, ...]) -> bytes:
    return b"".join(token.content for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_have_the_bytes_of_the_text(kind: str, text: str) -> None:
    tokenizer = ChatTokenizer(text_files(KINDS[kind]()))
    ids = tokenizer.encode_bare(text, is_first=False)

    for seed in range(5):
        (shown, content), _ = tell(tokenizer, ids, random.Random(seed))
        assert content.decode() == shown
        assert shown.strip() == text.strip()


def test_a_special_token_that_is_not_shown_is_not_told() -> None:
    tokenizer = ChatTokenizer(text_files(byte_level()))
    ids = tokenizer.encode_bare("ab", is_first=False)
    hidden = tokenizer.token_id(END)
    assert hidden is not None

    (shown, content), _ = tell(tokenizer, [hidden, *ids, hidden], random.Random(0))

    assert (shown, content) == ("ab", b"ab")


def test_the_tokens_of_half_a_character_at_the_end_are_told_with_what_stands_for_it() -> None:
    tokenizer = ChatTokenizer(text_files(byte_level()))
    ids = tokenizer.encode_bare("ab好", is_first=False)[:-1]

    (shown, content), _ = tell(tokenizer, ids, random.Random(0))

    assert shown == "ab\N{REPLACEMENT CHARACTER}"
    assert content == "ab好".encode()[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_cuts_the_tokens_with_the_text(kind: str) -> None:
    tokenizer = ChatTokenizer(text_files(KINDS[kind]()))
    ids = tokenizer.encode_bare("xy the 好 xSTOPa", is_first=False)

    for seed in range(5):
        (shown, content), _ = tell(tokenizer, ids, random.Random(seed), stops=("STOP", "yyy"))
        assert shown.strip() == "xy the 好 x"
        assert content.decode() == shown


def test_a_token_of_which_a_part_is_shown_is_told_whole() -> None:
    tokenizer = ChatTokenizer(text_files(byte_level()))
    ids = tokenizer.encode_bare("a he", is_first=False)
    assert tokenizer.token_bytes(ids[-1]) == b"he"

    (shown, content), _ = tell(tokenizer, ids, random.Random(0), stops=("e",))

    assert (shown, content) == ("a h", b"a he")


@pytest.mark.parametrize("starts", [True, False])
def test_thinking_has_its_own_tokens_and_its_marks_have_none(starts: bool) -> None:
    tokenizer = ChatTokenizer(text_files(byte_level()))
    whole = ("" if starts else "<think>\n") + "why é\n</think>\n\nbecause 好"
    ids = tokenizer.encode_bare(whole, is_first=False)

    for seed in range(10):
        answer, thinking = tell(tokenizer, ids, random.Random(seed), starts_thinking=starts)
        assert answer == ("because 好", "because 好".encode())
        assert thinking == ("why é", "why é".encode())


@pytest.mark.parametrize("kind", ZOO)
def test_an_id_without_a_token_has_no_bytes(kind: str) -> None:
    assert ChatTokenizer(text_files(ZOO[kind]())).token_bytes(1_000_000) == b""


def test_tokens_without_a_byte_level_have_their_text() -> None:
    tokenizer = ChatTokenizer(text_files(ZOO["lower case"]()))
    token = tokenizer.token_id("q")
    assert token is not None

    assert tokenizer.token_bytes(token) == b"q"


TAG = CALL_FORMATS[0]
CALL = '<tool_call>{"name": "f", "arguments": {"a": "bb"}}</tool_call>'


@pytest.mark.parametrize("seed", range(20))
def test_the_text_beside_calls_has_its_tokens_and_the_calls_have_none(seed: int) -> None:
    rng, tokenizer = random.Random(seed), ChatTokenizer(text_files(byte_level()))
    text = f"<think>a bb</think>\n\na é{CALL}bb{CALL} \n b<tool_call>[no</tool_call> é"
    ids = tokenizer.encode_bare(text, is_first=False)
    splitter = CallSplitter(TAG, ToolSet([{"name": "f"}]))

    (answer, told), (thinking, thought) = tell(tokenizer, ids, rng, calls=splitter)

    assert answer == "a ébbb<tool_call>[no</tool_call> é"
    assert told.decode() == answer
    assert thought.decode() == thinking == "a bb"
