"""ForwardBatch and device facts: pieces are laid out as the kernels read them."""

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.device import choose_device, dtype_name, dtype_of, free_bytes
from kvchat_kernels.slot_positions import EMPTY, SlotPositions

CPU = torch.device("cpu")


def test_pieces_lie_one_after_another_with_their_slots_and_rows() -> None:
    batch = build_batch(
        [
            SequencePiece([7, 8, 9], start=3, blocks=[5, 2], num_logit_rows=1),
            SequencePiece([1], start=0, blocks=[9, 4, 4], num_logit_rows=0),
            SequencePiece([3, 4], start=6, blocks=[1, 6], num_logit_rows=2),
        ],
        block_size=4,
        device=CPU,
    )

    assert batch.token_ids.tolist() == [7, 8, 9, 1, 3, 4]
    assert batch.positions.tolist() == [3, 4, 5, 0, 6, 7]
    assert batch.slot_mapping.tolist() == [23, 8, 9, 36, 26, 27]
    assert batch.logit_rows.tolist() == [2, 4, 5]
    assert batch.sequences.query_lens == (3, 1, 2)
    assert batch.sequences.context_lens == (6, 1, 8)
    assert batch.sequences.block_tables.tolist() == [[5, 2], [9, 0], [1, 6]]
    assert batch.sequences.query_starts.tolist() == [0, 3, 4, 6]
    assert batch.sequences.context_lens_device.tolist() == [6, 1, 8]


def test_a_private_table_has_fewer_slots_than_positions() -> None:
    """Two holes, a block less, and a text that goes on later; beside a shared table."""
    own = SlotPositions((0, EMPTY, EMPTY, 3, 8, 9), next_position=20)
    batch = build_batch(
        [
            SequencePiece([7, 8, 9], 21, [5, 2, 3], 1, table_positions=own),
            SequencePiece([1], 2, [9, 4], 0),
            SequencePiece([6], 100, [8], 0, table_positions=SlotPositions((), 99)),
        ],
        block_size=4,
        device=CPU,
    )

    assert batch.positions.tolist() == [21, 22, 23, 2, 100]
    assert batch.slot_mapping.tolist() == [2 * 4 + 3, 3 * 4, 3 * 4 + 1, 9 * 4 + 2, 8 * 4 + 1]
    assert batch.sequences.context_lens == (10, 3, 2)
    assert batch.sequences.block_tables.tolist() == [[5, 2, 3], [9, 0, 0], [8, 0, 0]]
    assert batch.sequences.positions.tolist() == [
        [0, -1, -1, 3, 8, 9, 20, 21, 22, 23],
        [0, 1, 2, *[-1] * 7],
        [99, 100, *[-1] * 8],
    ]


def test_positions_of_slots_ascend() -> None:
    for first, following in (((3, 2), 5), ((0, 4, EMPTY), 4), ((-2,), 1)):
        with pytest.raises(AssertionError):
            SlotPositions(first, following)


def test_a_table_too_short_for_its_context_is_refused() -> None:
    with pytest.raises((AssertionError, IndexError)):
        build_batch([SequencePiece([1, 2], 3, [5], 1)], 4, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_told() -> None:
    assert choose_device(ModelConfig(device="auto")) == CPU
    with pytest.raises(ModelError, match="There is no usable CUDA device"):
        choose_device(ModelConfig(device="cuda"))


def test_dtypes_are_named_as_the_settings_spell_them() -> None:
    for name in ("float32", "bfloat16", "float16"):
        dtype = dtype_of(name)
        assert dtype is not None
        assert dtype_name(dtype) == name
    assert dtype_of("auto") is None


def test_some_memory_is_free_and_less_than_there_is() -> None:
    page_bytes = 4096
    assert page_bytes < free_bytes(CPU) < 1 << 50
