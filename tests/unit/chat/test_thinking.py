"""ThinkingSplitter: thinking and answer are told apart alike, however the text is cut."""

import itertools
import random

import pytest

from kvchat.chat.thinking import ThinkingSplitter, split_thinking


def cut(text: str, cuts: list[int], starts_thinking: bool) -> tuple[str, str]:
    splitter = ThinkingSplitter(starts_thinking)
    edges = [0, *sorted(cuts), len(text)]
    passages = []
    for start, end in itertools.pairwise(edges):
        passages += splitter.feed(text[start:end])
    passages += splitter.flush()
    placed = [p for p in passages if not p.is_gap]
    assert all(text[p.start : p.end] == p.text for p in placed), "a passage has its place"
    thinking = "".join(p.text for p in passages if p.is_thinking)
    return thinking, "".join(p.text for p in passages if not p.is_thinking)


CASES = [
    ("Hello", False, ("", "Hello")),
    ("<think>\nhm\n</think>\n\nHello", False, ("hm", "Hello")),
    ("  \n<think>hm</think>Hello\n", False, ("hm", "Hello\n")),
    ("<thinking>a</think>b</thinking>c", False, ("a</think>b", "c")),
    ("[THINK]a[/THINK]b", False, ("a", "b")),
    ("<think>a</think>\n<think>b</think>", False, ("a", "<think>b</think>")),
    ("A <think>b</think>", False, ("", "A <think>b</think>")),
    ("<think>never closed\n", False, ("never closed\n", "")),
    ("<think></think>\n\n", False, ("", "")),
    ("<think>\n\n\n</think>\n\n x", False, ("", " x")),
    ("\nhm\n</think>\n\nHello", True, ("hm", "Hello")),
    ("hm[/THINK]Hello</think>", True, ("hm", "Hello</think>")),
    ("<thin", False, ("", "<thin")),
    ("  ", False, ("", "  ")),
    ("a\n\nb</thin", True, ("a\n\nb</thin", "")),
    ("a\n\n</think", True, ("a\n\n</think", "")),
    ("", False, ("", "")),
    # A closing mark between two backticks is quoted.
    ("<think>not `</think>` yet</think>\n\nyes", False, ("not `</think>` yet", "yes")),
    ("not `</think>` yet\n</think>\n\nyes", True, ("not `</think>` yet", "yes")),
    ("<think>run `ls`</think>\n\nyes", False, ("run `ls`", "yes")),
    ("<think>run `ls`</think>", False, ("run `ls`", "")),
    ("<think>`</think>`", False, ("`</think>`", "")),
]


@pytest.mark.parametrize(("text", "starts", "expected"), CASES)
def test_a_whole_text_is_split_at_its_marks(text, starts, expected):
    assert split_thinking(text, starts) == expected


@pytest.mark.parametrize(("text", "starts", "expected"), CASES)
def test_it_makes_no_difference_how_the_text_is_cut(text, starts, expected):
    """Blank lines next to a mark used to stay where they came in a piece of their own, and a second
    mark was taken for thinking where the answer had not begun in the first one's piece."""
    rng = random.Random(3)
    every = list(range(1, len(text)))
    assert cut(text, every, starts) == expected
    for _ in range(50):
        assert cut(text, rng.sample(every, rng.randint(0, len(every))), starts) == expected


def test_random_texts_of_marks_are_cut_alike() -> None:
    rng = random.Random(9)
    parts = ["<think>", "</think>", "[THINK]", "[/THINK]", "\n", " ", "a", "<", "</", "think>", "b"]
    for _ in range(1500):
        text = "".join(rng.choices(parts, k=rng.randint(0, 8)))
        starts = rng.random() < 0.3
        whole = split_thinking(text, starts)
        cuts = [i for i in range(1, len(text)) if rng.random() < 0.5]
        assert cut(text, cuts, starts) == whole, (text, cuts)


def test_what_cannot_be_a_mark_is_shown_at_once() -> None:
    splitter = ThinkingSplitter()

    assert [p.text for p in splitter.feed("Hel")] == ["Hel"]
    assert [p.text for p in splitter.feed("lo <th")] == ["lo <th"]


def test_thinking_is_shown_as_it_comes_but_for_what_may_be_its_end() -> None:
    splitter = ThinkingSplitter()

    assert splitter.feed("<think>\n") == []
    assert splitter.is_thinking
    assert [p.text for p in splitter.feed("one\n\ntwo\n</th")] == ["one\n\ntwo"]
    assert [p.text for p in splitter.feed("ree")] == ["\n</three"]
    assert splitter.feed("</think>") == []
    assert not splitter.is_thinking


CHANNELS = (
    "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    "<|channel|>final<|message|>It is 4."
)


_NEXT = "<|end|><|start|>assistant"
_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_COMMENTARY = "<|channel|>commentary<|message|>"
_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{no"
IN_CHANNELS = [
    (CHANNELS, False, ("Let me see.", "It is 4.")),
    (f"{_FINAL}Hi", False, ("", "Hi")),
    (f"{_COMMENTARY}I look.{_NEXT}{_FINAL}done", False, ("", "I look.\n\ndone")),
    (f"hm{_NEXT}{_COMMENTARY}I will look.", True, ("hm", "I will look.")),
    (f"hm{_NEXT}{_ANALYSIS}so{_NEXT}{_FINAL}x", True, ("hm\n\nso", "x")),
    (f"{_ANALYSIS}a{_NEXT}{_ANALYSIS}b{_NEXT}{_FINAL}c", False, ("a\n\nb", "c")),
    ("<|channel|>final <|constrain|>json<|message|>{}", False, ("", "{}")),
    ("<|channel|>final json<|message|>{}", False, ("", "{}")),
    ("<|channel|>commentary?<|message|>x", False, ("", "x")),
    (f"<|start|>assistant{_FINAL}x", False, ("", "x")),
    ("<|start|>assistant<|message|>x", False, ("", "x")),
    (f"{_ANALYSIS}a{_NEXT}", False, ("a", "")),
    (f"{_ANALYSIS}a{_NEXT}<|channel|>fin", False, ("a", "")),
    (f"{_ANALYSIS}a < b <| c{_NEXT}{_FINAL}d < e <|", False, ("a < b <| c", "d < e <|")),
    (f"{_ANALYSIS}a{_NEXT}{_CALL}", False, ("a", f"{_NEXT}{_CALL}")),
    (f"{_ANALYSIS}a<|end|>more", False, ("a", "<|end|>more")),
]


@pytest.mark.parametrize(("text", "starts", "expected"), IN_CHANNELS)
def test_a_model_that_speaks_in_channels_thinks_in_one_and_answers_in_the_others(
    text: str, starts: bool, expected: tuple[str, str]
) -> None:
    """What stood before a call, in the channel `commentary`, was thinking with raw marks in it."""
    rng = random.Random(5)
    every = list(range(1, len(text)))

    for cuts in ([], every, *(rng.sample(every, rng.randint(0, len(every))) for _ in range(20))):
        assert cut(text, cuts, starts) == expected


ODD = [
    *("<think>", "</think>", "`", "\n", "a", "analysis", "final", "assistant"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>"),
]


def test_random_texts_of_channels_and_quotes_are_cut_alike() -> None:
    rng = random.Random(11)
    for _ in range(1500):
        text = "".join(rng.choices(ODD, k=rng.randint(0, 9)))
        starts = rng.random() < 0.3
        cuts = [i for i in range(1, len(text)) if rng.random() < 0.5]
        assert cut(text, cuts, starts) == split_thinking(text, starts), (text, cuts)
