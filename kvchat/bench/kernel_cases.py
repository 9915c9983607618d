"""The kernels as things to be measured: data, the bytes that have to move, a twin, peers.

Knows the shapes a decode step has. Measures nothing.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from kvchat.bench.attention_cases import BLOCK_SIZE, attention_cases
from kvchat.bench.kernel_case import KernelCase, KernelShape, Peer, Place
from kvchat_kernels.block_copy import PoolTensors, copy_blocks, gather_blocks
from kvchat_kernels.rms_norm import add_rms_norm
from kvchat_kernels.rope_kv_write import HeadNorms, Rotation, StepKv, rope_kv_write
from kvchat_kernels.sampler import SamplerRows, sample_tokens
from kvchat_kernels.silu_mul import silu_mul
from kvchat_kernels.skinny_linear import skinny_linear

_ROWS = (1, 5, 16)


def kernel_cases(
    shape: KernelShape, place: Place, contexts: tuple[int, ...]
) -> Iterator[KernelCase]:
    """Yield the cases one by one: each is given up before the next takes its memory."""
    yield _norm(shape, place)
    yield _gate(shape, place)
    for num_rows in (1, 512):
        yield _rope(shape, place, num_rows)
    yield from _block_copies(shape, place)
    yield from _products(shape, place)
    yield from _samplers(shape, place)
    for context in contexts:
        yield from attention_cases(shape, place, context)


def _norm(shape: KernelShape, place: Place) -> KernelCase:
    hidden, residual = place.random(1, shape.hidden), place.random(1, shape.hidden)
    weight = place.random(shape.hidden)

    def run(impl: str) -> torch.Tensor:
        return add_rms_norm(hidden, residual, weight, 1e-6, impl=impl)[0]

    num_bytes = 5 * weight.nbytes
    return KernelCase(
        "add, rms norm", num_bytes, False, 1, lambda _: run("auto"), lambda: run("reference")
    )


def _gate(shape: KernelShape, place: Place) -> KernelCase:
    gate, up = place.random(1, 2 * shape.intermediate).chunk(2, dim=1)
    return KernelCase(
        "silu times up",
        3 * gate.nbytes,
        False,
        1,
        lambda _: silu_mul(gate, up),
        lambda: silu_mul(gate, up, impl="reference"),
    )


def _rope(shape: KernelShape, place: Place, num_rows: int) -> KernelCase:
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    merged = place.random(num_rows, sum(widths))
    query, key, value = (part.view(num_rows, -1, dim) for part in merged.split(widths, dim=1))
    angles = torch.rand(num_rows, dim // 2, device=place.device)
    rotation = Rotation(angles.cos(), angles.sin())
    pool = place.random(1 + num_rows // BLOCK_SIZE, BLOCK_SIZE, kv_heads, dim)
    step = StepKv(pool, pool.clone(), torch.arange(num_rows, device=place.device))
    norms = HeadNorms(place.random(dim), place.random(dim), 1e-6)

    def run(impl: str) -> torch.Tensor:
        return rope_kv_write(query, key, value, rotation, step, norms, impl=impl)

    return KernelCase(
        f"head norms, rope, KV write, {num_rows} rows",
        2 * merged.nbytes,
        False,
        1,
        lambda _: run("auto"),
        lambda: run("reference"),
    )


def _block_copies(shape: KernelShape, place: Place) -> Iterator[KernelCase]:
    block = (BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    num_blocks = 64
    tensors = [place.random(2 * num_blocks, *block) for _ in range(2 * shape.num_layers)]
    pools = PoolTensors(tensors)
    size = (num_blocks, pools.image_bytes)
    images, expected = (torch.empty(size, dtype=torch.uint8, device=place.device) for _ in range(2))
    # On the device already: a graph cannot capture the ids' way there.
    blocks = torch.arange(0, 2 * num_blocks, 2, device=place.device)

    def gather(images: torch.Tensor, impl: str = "auto") -> torch.Tensor:
        gather_blocks(pools, blocks, images, impl=impl)
        return images

    def copy(_: int) -> torch.Tensor:
        copy_blocks(pools, blocks[:1], blocks[:1] + 1)
        return tensors[-1][1]

    name = f"gather {num_blocks} blocks"
    num_bytes = 2 * images.nbytes
    yield KernelCase(
        name, num_bytes, False, 1, lambda _: gather(images), lambda: gather(expected, "reference")
    )
    num_bytes = 2 * pools.image_bytes
    yield KernelCase("copy a block", num_bytes, False, 1, copy, lambda: tensors[-1][0])


def _products(shape: KernelShape, place: Place) -> Iterator[KernelCase]:
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    products = {
        "qkv": (qkv, shape.hidden),
        "out": (shape.hidden, shape.num_heads * shape.head_dim),
        "gate and up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
        "head": (shape.vocab, shape.hidden),
    }
    for name, (out_size, in_size) in products.items():
        num_bytes = out_size * in_size * place.dtype.itemsize
        weights = [place.random(out_size, in_size) for _ in range(place.copies(num_bytes))]
        for num_rows in _ROWS:
            yield _product(f"{name}, {num_rows} rows", weights, place.random(num_rows, in_size))


def _product(name: str, weights: list[torch.Tensor], rows: torch.Tensor) -> KernelCase:
    return KernelCase(
        name,
        weights[0].nbytes,
        True,
        len(weights),
        lambda i: skinny_linear(rows, weights[i]),
        lambda: skinny_linear(rows, weights[0], impl="reference"),
        (Peer("torch's linear", lambda i: functional.linear(rows, weights[i])),),
    )


def _samplers(shape: KernelShape, place: Place) -> Iterator[KernelCase]:
    logits = 3 * torch.randn(1, shape.vocab, device=place.device)

    def one(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((1,), value, dtype=dtype, device=place.device)

    kinds = {"greedy": (0.0, 0, 1.0), "top-p 0.9": (0.8, 0, 0.9), "top-k 20": (0.6, 20, 0.95)}
    for name, (temperature, top_k, top_p) in kinds.items():
        rows = SamplerRows(
            one(temperature, torch.float32),
            one(top_k, torch.int32),
            one(top_p, torch.float32),
            one(0.0, torch.float32),
            one(1, torch.int64),
            one(1, torch.int64),
        )
        yield KernelCase(
            f"sample, {name}",
            logits.nbytes,
            True,
            1,
            partial(_sample, logits, rows),
            partial(sample_tokens, logits, rows, impl="reference"),
        )


def _sample(logits: torch.Tensor, rows: SamplerRows, _: int) -> torch.Tensor:
    return sample_tokens(logits, rows)
