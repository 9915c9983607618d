"""An answer that only repeats itself ends, and ordinary text that repeats a lot does not."""

import random
from array import array
from base64 import b64encode
from collections.abc import Callable
from zlib import crc32

import pytest

from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine.request import RequestSpec, only_repeats
from support.engine_harness import EngineHarness

LIMIT = 2048
# Like a vocabulary with pieces of words, with one of single letters, and in between.
TOKENIZERS: dict[str, Callable[[str], list[str]]] = {
    "letters": list,
    "pairs": lambda text: [text[i : i + 2] for i in range(0, len(text), 2)],
    "words": lambda text: text.replace(" ", " \0").split("\0"),
}


def caught_at(ids: list[int], num_prompt: int = 0) -> int | None:
    """Return after how many tokens of the answer it is caught, None if it never is."""
    context = array("i", [9] * num_prompt)
    for number, token_id in enumerate(ids, start=1):
        context.append(token_id)
        if only_repeats(context, number, LIMIT):
            return number
    return None


@pytest.mark.parametrize(
    ("passage", "most"),
    [
        ([5], LIMIT + 32),
        ([35, 32], LIMIT + 32),
        ([1, 2, 3], 2 * LIMIT + 32),
        (list(range(64)), 2 * LIMIT + 64),
    ],
)
@pytest.mark.parametrize("num_before", [0, 777])
def test_one_passage_over_and_over_is_caught(passage, most, num_before):
    """`git diff | kvchat` wrote "# #" until the timeout."""
    rng = random.Random(0)
    before = [rng.randrange(100, 1000) for _ in range(num_before)]

    found = caught_at([*before, *passage * 9000][: 2 * most + num_before], num_prompt=5000)

    assert found is not None
    assert most - 64 <= found - num_before <= most


TEXTS = {
    "a rule of dashes": "-" * 1500 + "\n" + "=" * 1500,
    "a table": "| a | b |\n|---|---|\n" + "".join(f"| {n} | 0 |\n" for n in range(2000)),
    "code of zeros": "x = [" + "0, " * 1000 + "]",
    "rows of zeros": "0 0 0 0 0 0 0 0\n" * 200,
    "zeros in base64": b64encode(bytes(1400)).decode(),
    "base64": b64encode(random.Random(1).randbytes(9000)).decode(),
    "counting": "".join(f"{n}, " for n in range(4000)),
    "a list of one word": "- yes\n" * 300,
    "nested brackets": "(" * 900 + ")" * 900,
    "a blank page": "\n" * 1900,
}


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_ordinary_text_is_not_caught(text: str, tokenizer: Callable[[str], list[str]]) -> None:
    assert caught_at([crc32(piece.encode()) % 50_000 for piece in tokenizer(text)]) is None


def test_a_limit_of_0_lets_it_go_on() -> None:
    assert not only_repeats(array("i", [5] * 9216), 9216, 0)


@pytest.mark.parametrize(
    ("limit", "reason", "num_tokens"),
    [(128, FinishReason.REPETITION, 128), (0, FinishReason.LENGTH, 392)],
)
def test_the_engine_ends_such_an_answer(limit: int, reason: FinishReason, num_tokens: int) -> None:
    harness = EngineHarness(max_context=400)
    sampling = SamplingParams(temperature=0.0, logit_bias=((7, 100.0),))
    spec = RequestSpec(tuple(range(8)), sampling, repetition_limit=limit)

    request_id = harness.submit(spec)
    harness.run()
    ended = harness.ending(request_id)

    assert (ended.reason, ended.usage.completion_tokens) == (reason, num_tokens)
