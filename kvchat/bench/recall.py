"""A recall suite: facts in texts that a seed makes, and a question on each of them.

The facts stand at even distances from the beginning of a context to its end. An answer is the word
that the model thinks likeliest of all words of the text that could be one, so that chance is right
in one of twenty, and no answer is cut off or has to be judged.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from kvchat.bench.engines import kv_of_a_text
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.batch import SequencePiece
from kvchat.model.paged_model import model_over
from kvchat_kernels.state_buffer import StateBuffer

Encode = Callable[[str], list[int]]

NUM_TEXTS, NUM_FACTS = 5, 20
_ROWS = 64
_NAMES = (
    "Alice Bruno Clara David Emma Felix Greta Henry Irene James Karin Louis Maria Nadia Oscar "
    "Paula Quentin Rosa Simon Theresa"
)
_THINGS = (
    "apples bread cheese dancing eggs fishing gardens honey islands jazz knitting lemons music "
    "novels oranges painting rain singing tea walking birds chess films grapes horses maps opera "
    "pears roses sailing trains wine"
)
_FILLERS = (
    "The bus to the harbour leaves every {} minutes.",
    "In the old house there are {} rooms, and most of them are empty.",
    "The library closed at {} in the evening last year.",
    "Somebody painted the fence green, which took {} days.",
    "A letter arrived from the mill after {} weeks.",
    "The weather was mild, with {} hours of sun.",
)


@dataclass(frozen=True, slots=True)
class RecallText:
    """A text, and for each fact in it, the first fact first, the question and the first token of
    the right answer. The others' answers are its options.
    """

    ids: list[int]
    questions: list[list[int]]
    answers: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of the text with its longest question."""
        return len(self.ids) + max(map(len, self.questions))


def recall_texts(encode: Encode, num_tokens: int) -> list[RecallText]:
    """Return texts of at most `num_tokens` tokens, question included, but of all facts at least.

    None if the tokenizer does not tell enough answers apart by their first token.
    """
    words = _words(encode)
    if len(words) < NUM_FACTS:
        return []
    return [_recall_text(encode, words, num_tokens, seed) for seed in range(NUM_TEXTS)]


def _words(encode: Encode) -> dict[str, int]:
    """Return words by which a model can choose, for they differ in their first token."""
    question = encode("Alice likes")
    first: dict[int, str] = {}
    for thing in _THINGS.split():
        ids = encode(f"Alice likes {thing}")
        start = sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(question, ids, strict=False)))
        if start == len(question) < len(ids):
            first.setdefault(ids[start], thing)
    return {thing: token for token, thing in first.items()}


def _recall_text(encode: Encode, words: dict[str, int], num_tokens: int, seed: int) -> RecallText:
    draw = random.Random(seed)
    names, things = draw.sample(_NAMES.split(), NUM_FACTS), draw.sample(sorted(words), NUM_FACTS)
    num_first = len(encode(""))  # of the token that begins a context
    questions = [encode(f"\nWhat does {name} like? {name} likes")[num_first:] for name in names]
    room = num_tokens - max(map(len, questions))
    parts = [[f"{name} likes {thing}."] for name, thing in zip(names, things, strict=True)]
    ids = encode(_joined(parts))
    while True:
        for part in parts:
            part.append(draw.choice(_FILLERS).format(draw.randrange(2, 60)))
        longer = encode(_joined(parts))
        if len(longer) > room:
            return RecallText(ids, questions, [words[thing] for thing in things])
        ids = longer


def _joined(parts: Sequence[Sequence[str]]) -> str:
    return " ".join(sentence for part in parts for sentence in part)


def recall(assembled: AssembledEngine, text: RecallText) -> list[int]:
    """Return for each question the number of the answer that the model chooses.

    Right is for the first question the first, and so on. It rebinds the model's attention.
    """
    loaded, block_size = assembled.loaded, assembled.engine.cache.block_size
    blocks = range(1, 2 + text.num_tokens // block_size)
    model = model_over(loaded, kv_of_a_text(assembled, len(blocks) + 1))

    def last_logits(ids: list[int], start: int, state: StateBuffer | None) -> torch.Tensor:
        piece = SequencePiece(ids, start, blocks, 1, state)
        return model.forward_pieces([piece], block_size)[-1]

    state = model.new_state()
    for start in range(0, len(text.ids), _ROWS):
        last_logits(text.ids[start : start + _ROWS], start, state)
    # Each question takes the place of the one before.
    states = (state.copy() if state is not None else None for _ in text.questions)
    return [
        int(last_logits(question, len(text.ids), own)[text.answers].argmax())
        for question, own in zip(text.questions, states, strict=True)
    ]
