"""Streams of tokens give the text of the whole, in whatever pieces; stop strings stop all alike."""

import itertools
import random

import pytest

from kvchat.chat.decoding import AnswerParts, AnswerWatcher, StopFilter
from kvchat.chat.tokenizer import ChatTokenizer
from support.tokenizer_zoo import ZOO, text_files

TEXTS = [
    "the cab",
    " a  b ",
    "héhé 好好 a 好",
    "smile 😀😀 end",
    "👩\u200d👩\u200d👧 family",
    "\n\n好\t\n",
    "x" * 50,
]


def streamed(tokenizer: ChatTokenizer, context: list[int], ids: list[int]) -> list[str]:
    stream = tokenizer.new_stream(context)
    return [*(stream.feed(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "unigram"])
def test_the_pieces_of_a_stream_are_its_text_and_no_piece_splits_a_character(kind, text):
    raw = ZOO[kind]()
    tokenizer = ChatTokenizer(text_files(raw))
    context = raw.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    ids = raw.encode(text, add_special_tokens=False).ids

    pieces = streamed(tokenizer, context, ids)

    whole = tokenizer.decode([*context, *ids])
    assert "".join(pieces) == whole[len(tokenizer.decode(context)) :]
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "unigram"])
def test_a_stream_cut_within_a_character_ends_with_its_replacement(kind: str) -> None:
    raw = ZOO[kind]()
    tokenizer = ChatTokenizer(text_files(raw))
    ids = raw.encode("ab😀", add_special_tokens=False).ids[:-1]

    pieces = streamed(tokenizer, [], ids)

    assert "".join(pieces[:-1]) == "ab"
    assert set(pieces[-1]) == {"\ufffd"}


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "unigram"])
def test_no_sequence_of_ids_breaks_a_stream(kind: str) -> None:
    """With byte fallback a malformed run of bytes makes the library read earlier bytes anew, and
    its stream raised: on the engine's thread, where it ended every conversation."""
    rng = random.Random(1)
    raw = ZOO[kind]()
    tokenizer = ChatTokenizer(text_files(raw))
    size = raw.get_vocab_size() + 10  # models have ids that their tokenizer does not know
    for _ in range(1500):
        context = [rng.randrange(size) for _ in range(rng.randint(0, 10))]
        ids = [rng.randrange(size) for _ in range(rng.randint(1, 25))]

        text = "".join(streamed(tokenizer, context, ids))

        rest = iter(text)
        letters = [p for p in map(raw.id_to_token, ids) if p in set("gkqvwxyz")]
        assert all(letter in rest for letter in letters), "a letter is missing"


def test_malformed_bytes_cost_their_own_text_only() -> None:
    raw = ZOO["byte fallback"]()
    tokenizer = ChatTokenizer(text_files(raw))
    ids = [raw.token_to_id(t) for t in ("a", "<0x0A>", "<0xF0>", "<0x9F>", "b", "▁the")]

    pieces = streamed(tokenizer, [], ids)

    assert pieces[:2] == ["a", "\n"]
    assert pieces[4] == "\ufffd\ufffdb"
    assert pieces[5] == " the"


def test_a_context_that_ends_within_a_character_is_not_repeated() -> None:
    """The library took the text of such a context for part of the answer."""
    raw = ZOO["byte level"]()
    tokenizer = ChatTokenizer(text_files(raw))
    context = raw.encode("secret 😀", add_special_tokens=False).ids[:-1]
    answer = raw.encode("ok", add_special_tokens=False).ids

    assert "".join(streamed(tokenizer, context, answer)) == "ok"


def pieces_of(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), k=min(len(text) + 1, rng.randint(0, 6))))
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def filtered(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop_filter = StopFilter(stops)
    shown = "".join(stop_filter.feed(piece) for piece in pieces)
    return shown + stop_filter.flush(), stop_filter.has_stopped


def plain_filter(stops: list[str], text: str) -> tuple[str, bool]:
    """Read character by character until one of the stops stands at the end."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def test_stop_strings_work_the_same_however_the_text_is_cut() -> None:
    """Of two stops in one piece the one that began first used to win, character by character the
    one that was complete first: the same answer ended in different places."""
    rng = random.Random(0)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 12)))
        expected = plain_filter(stops, text)

        assert filtered(stops, pieces_of(text, rng)) == expected, (stops, text)


def test_text_that_might_be_a_stop_is_held_back_and_nothing_else() -> None:
    stop_filter = StopFilter(["\nUser:"])

    assert stop_filter.feed("Hello") == "Hello"
    assert stop_filter.feed("\nUs") == ""
    assert stop_filter.feed("e it") == "\nUse it"
    assert stop_filter.feed("\nUser: x") == ""
    assert stop_filter.has_stopped
    assert stop_filter.feed("more") == ""
    assert stop_filter.flush() == ""


def test_a_watcher_sees_a_stop_string_across_tokens_and_never_before_it() -> None:
    raw = ZOO["byte fallback"]()
    tokenizer = ChatTokenizer(text_files(raw))
    ids = raw.encode("the 好 a", add_special_tokens=False).ids
    watcher = AnswerWatcher(tokenizer.new_stream([]), AnswerParts(["好 "], False), {})

    seen = [watcher.feed(token) for token in ids]

    first = seen.index(True)
    assert "好 " in tokenizer.decode(ids[: first + 1])
    assert "好 " not in tokenizer.decode(ids[:first])
