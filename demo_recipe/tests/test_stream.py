"""Training rows: packed tight, replayable, and learning replies only."""

import random
from itertools import islice, pairwise

import pytest
import torch

from demo_recipe.conversation import Conversations, Shape
from demo_recipe.network import Rows
from demo_recipe.stream import ROW_LENGTHS, Leg, Mix, clip, jumping_positions
from demo_recipe.tokenizer import ChatTokenizer, Encoded, train_tokenizer

BRIEF = Shape(mean_turns=3, max_turns=8)
MIX = Mix(((BRIEF, 0.9), (Shape(characters=3000), 0.1)), jump_rate=0.5)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(train_tokenizer(islice(Conversations(1).stream(BRIEF), 300), 700))


def batches(tokenizer: ChatTokenizer, leg: int, count: int = 6) -> list[Rows]:
    stream = Leg(tokenizer, MIX, seed=1, leg=leg, batch_tokens=2048)
    return list(islice(stream.batches(), count))


def test_a_leg_can_be_replayed_and_differs_from_the_next(tokenizer: ChatTokenizer) -> None:
    first, again, other = (batches(tokenizer, leg) for leg in (0, 0, 1))

    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.ids, two.ids)
        assert torch.equal(one.positions, two.positions)
    assert not all(torch.equal(one.ids, two.ids) for one, two in zip(first, other, strict=False))


def test_rows_hold_a_batch_of_tokens_with_little_padding(tokenizer: ChatTokenizer) -> None:
    made = batches(tokenizer, 0, 12)

    assert all(rows.ids.shape[1] in ROW_LENGTHS for rows in made)
    filled = torch.cat([(rows.segments > 0).flatten() for rows in made])
    assert filled.float().mean() > 0.9


def test_every_target_is_the_next_token_of_the_same_chat(tokenizer: ChatTokenizer) -> None:
    for rows in batches(tokenizer, 0):
        row, at = (rows.targets != -100).nonzero(as_tuple=True)

        assert len(row)
        assert torch.equal(rows.targets[row, at], rows.ids[row, at + 1])
        assert torch.equal(rows.segments[row, at], rows.segments[row, at + 1])
        assert rows.segments[row, at].min() > 0


def test_each_chat_starts_anew_and_is_in_one_piece(tokenizer: ChatTokenizer) -> None:
    for rows in batches(tokenizer, 0):
        for ids, segments in zip(rows.ids, rows.segments, strict=True):
            num_chats = int(segments.max())
            starts = (ids == tokenizer.bos_id).nonzero().flatten()
            assert len(starts) == num_chats
            assert [int(segments[start]) for start in starts] == list(range(1, num_chats + 1))


def test_jumping_positions_only_skip_ahead_and_only_between_messages() -> None:
    encoded = Encoded(list(range(60)), [False] * 60, [1, 11, 21, 31, 41, 51], [False] * 60)
    rng = random.Random(3)
    longest = 0

    for _ in range(200):
        positions = jumping_positions(encoded, 4096, rng)
        steps = [later - now for now, later in pairwise(positions)]
        assert all(step == 1 or index + 1 in encoded.starts for index, step in enumerate(steps))
        assert min(steps) >= 1
        assert positions[-1] < 4096
        longest = max(longest, positions[-1])
    assert longest > 3000


def test_a_chat_that_is_too_long_is_cut() -> None:
    encoded = Encoded(list(range(10)), [True] * 10, [1, 8], [False] * 10)

    assert clip(encoded, 5) == Encoded(list(range(5)), [True] * 5, [1], [False] * 5)
    assert clip(encoded, 10) is encoded
