"""The trial of a layer's tiles: each runs once on the device, before a model depends on it.

A tile may need more shared memory or registers than a GPU has, or a compiler may fail on it. Then
the layer runs plain torch, and the user gets the reason, instead of an error in the first step.
"""

import torch

from kvchat_kernels.launch import Launch
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from kvchat_kernels.paged_attention.sequences import PagedSequences, Scoring
from kvchat_kernels.paged_attention.tiles import LayerShape
from kvchat_kernels.paged_attention.triton_gpu import (
    AttentionCall,
    card_of,
    prefill_launch,
    split_launches,
)
from kvchat_kernels.smoke_test import FAILURES, reason_of

# As a model's usual pools are, so that the compiled kernels are those that its steps need.
_BLOCK_SIZE = 16
_QUERY_LENS, _CONTEXT_LENS = (1, 5), (1, 40)
_TOLERANCE = 16


def trial_error(device: torch.device, shape: LayerShape) -> str | None:
    """Return why the layer's kernels do not run, as the end of a sentence; None if they do.

    Takes a few seconds where the kernels are compiled for the first time.
    """
    call = _small_call(device, shape)
    try:
        expected = _expected(call)
        for launches in _every_tile(call):
            call.out.fill_(float("nan"))
            for launch in launches:
                launch.run()
            if not _agree(call.out, expected):
                return "the attention kernels compute wrong results here"
    except FAILURES as error:
        return f"the attention kernels do not run here: {reason_of(error)}"
    return None


def _every_tile(call: AttentionCall) -> list[list[Launch]]:
    card = card_of(call.query.device)
    *split, prefill = call.tiles(card)
    longest = max(_QUERY_LENS)
    return [
        *(list(split_launches(call, 1, longest, card, tile)) for tile in dict.fromkeys(split)),
        [prefill_launch(call, 1, prefill, card)],
    ]


def _small_call(device: torch.device, shape: LayerShape) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(device, shape.dtype)

    num_tokens = sum(_QUERY_LENS)
    tables = torch.tensor([[1, 0, 0], [2, 4, 3]], dtype=torch.int32, device=device)
    pool = (5, _BLOCK_SIZE, shape.num_kv_heads)
    query = random(num_tokens, shape.num_heads, shape.key_dim)
    keys, values = random(*pool, shape.key_dim), random(*pool, shape.value_dim)
    key_scales = value_scales = None
    if shape.code is not None:
        keys, key_scales = shape.code.keys.quantised(keys)
        values, value_scales = shape.code.values.quantised(values)
    return AttentionCall(
        query=query,
        key_pool=keys,
        value_pool=values,
        sequences=PagedSequences(_QUERY_LENS, _CONTEXT_LENS, tables, _BLOCK_SIZE),
        scoring=Scoring(shape.key_dim**-0.5),
        out=query.new_empty(num_tokens, shape.num_heads, shape.value_dim),
        key_scales=key_scales,
        value_scales=value_scales,
        code=shape.code,
    )


def _expected(call: AttentionCall) -> torch.Tensor:
    keys, values = call.key_pool, call.value_pool
    if call.code is not None:
        assert call.key_scales is not None
        assert call.value_scales is not None
        # As the kernels restore them: rounded once to the query's dtype.
        keys = call.code.keys.restored(keys, call.key_scales).to(call.query.dtype)
        values = call.code.values.restored(values, call.value_scales).to(call.query.dtype)
    return paged_attention_reference(call.query, keys, values, call.sequences, call.scoring)


def _agree(out: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = _TOLERANCE * torch.finfo(out.dtype).eps * float(expected.abs().max())
    return bool(((out - expected).abs() <= tolerance).all())  # NaN agrees with nothing
