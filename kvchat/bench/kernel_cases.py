"""The cases of the kernel benchmark: data, minimum bytes, a torch reference and peers.

Shapes are those of a decode step. Paged attention also has verifications and prefills; its peers
are SDPA on contiguous KV, and FlashInfer on the same blocks if installed. `kernels` measures them.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from kvchat_kernels.block_copy import PoolTensors, copy_blocks, gather_blocks
from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.experts import block_experts
from kvchat_kernels.kv_code import CODES, KvCode
from kvchat_kernels.kv_write import HeadNorms, Rotation, StepKv, rope_kv_write
from kvchat_kernels.linear.block_linear import block_linear
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, quantised_on, reordered
from kvchat_kernels.paged_attention import PagedSequences, Scoring, paged_attention
from kvchat_kernels.row_operations import add_rms_norm, one_row_linear, silu_mul
from kvchat_kernels.sampler import SamplerRows, sample_tokens


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The sizes of a model that determine its kernels' shapes."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_layers: int

    @classmethod
    def of(cls, config: Any) -> "KernelShape":
        """Read the sizes from a transformers configuration."""
        num_heads = config.num_attention_heads
        return cls(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            vocab=config.vocab_size,
            num_layers=config.num_hidden_layers,
        )


@dataclass(frozen=True, slots=True)
class Place:
    """The device and dtype of the cases, and the bytes of the device's L2 cache."""

    device: torch.device
    dtype: torch.dtype
    cache_bytes: int

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def copies(self, num_bytes: int) -> int:
        """Return how many sets of `num_bytes` exceed twice the cache; 64 at most."""
        return min(64, 1 + 2 * self.cache_bytes // num_bytes)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library's kernel for the same operation; `run` runs it on the i-th set of data.

    If `is_same` is false, it omits a part (a mask, for example), and only its time is compared.
    """

    name: str
    run: Callable[[int], torch.Tensor]
    is_same: bool = True


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape.

    num_bytes        the bytes to read and write, each once
    is_read_only     whether nearly all of them are reads
    run              runs the kernel on the i-th of `num_sets` sets of data
    twin             computes the result for set 0 in plain torch
    peers            kernels to compare with
    num_flops        the FLOP of a compute-bound kernel; 0 for a memory-bound one
    """

    name: str
    num_bytes: int
    is_read_only: bool
    num_sets: int
    run: Callable[[int], torch.Tensor]
    twin: Callable[[], torch.Tensor]
    peers: tuple[Peer, ...] = ()
    num_flops: int = 0

    def is_right(self) -> bool:
        """Return whether `run` agrees with the twin on set 0; see `is_near_twin`."""
        return self.is_near_twin(self.run(0))

    def is_near_twin(self, ours: torch.Tensor) -> bool:
        """Return whether a result for set 0 is the twin's.

        Integers must be equal; floats may differ by 8 epsilons of the largest value.
        """
        expected = self.twin()
        if not ours.is_floating_point():
            return torch.equal(ours, expected)
        tolerance = 8 * torch.finfo(ours.dtype).eps * expected.abs().max().item()
        return torch.allclose(ours.float(), expected.float(), rtol=0.0, atol=tolerance)


BLOCK_SIZE = 16
_CHUNK = 512  # new tokens after a cached context
_BATCH = 8  # sequences that decode together
_NUM_EXPERTS, _TOP_K = 16, 4
_WORKSPACE_BYTES = 128 << 20  # as FlashInfer recommends


def attention_cases(shape: KernelShape, place: Place, context: int) -> Iterator[KernelCase]:
    """Yield the cases of one context one by one; the caller drops each before the next."""
    for num_rows in (1, 5):
        yield _attention(
            _AttentionStep(shape, place, context, num_rows), few_rows(context, num_rows)
        )
    for code in CODES.values():
        if code.takes(shape.head_dim, shape.head_dim):
            single = _AttentionStep(shape, place, context, 1)
            yield _coded_attention(single, code, f"{few_rows(context, 1)}, KV in {code.name}")
            del single
    batch = _AttentionStep(shape, place, context, 1, _BATCH)
    yield _attention(batch, f"attention, {_BATCH} sequences of {context:,} tokens")
    del batch
    yield _prefill(shape, place, context, context)
    if context > _CHUNK:
        yield _prefill(shape, place, context, _CHUNK)


def few_rows(context: int, num_rows: int) -> str:
    """Return the name of the case of a decode, or of a verification of several rows."""
    return f"attention, {num_rows} rows on {context:,} tokens"


def _attention(step: "_AttentionStep", name: str) -> KernelCase:
    return KernelCase(
        name,
        step.num_bytes,
        True,
        len(step.pools),
        step.attend,
        lambda: step.attend(0, "reference"),
        (
            Peer("SDPA, contiguous KV, no mask", step.contiguous, is_same=step.num_rows == 1),
            *_flashinfer(step),
        ),
    )


def _coded_attention(step: "_AttentionStep", code: KvCode, name: str) -> KernelCase:
    """Return attention over the same KV in a code; the twin has what that stores."""
    layers = [
        CodedKv(*code.keys.quantised(key), *code.values.quantised(value), code)
        for key, value in step.pools
    ]
    step.pools.clear()

    def run(index: int) -> torch.Tensor:
        return layers[index].attend(step.query, step.sequences, Scoring(step.scale))

    def twin() -> torch.Tensor:
        first, dtype = layers[0], step.query.dtype
        keys = code.keys.plain(first.keys, first.key_scales).to(dtype)
        values = code.values.plain(first.values, first.value_scales).to(dtype)
        pools = keys, values
        return paged_attention(step.query, *pools, step.sequences, Scoring(step.scale), "reference")

    token_bytes = sum(tensor[0, 0].nbytes for tensor in layers[0].tensors)
    num_bytes = token_bytes * step.context * step.num_sequences
    return KernelCase(name, num_bytes, True, len(layers), run, twin)


def _prefill(shape: KernelShape, place: Place, context: int, num_rows: int) -> KernelCase:
    step = _AttentionStep(shape, place, context, num_rows)
    pairs = num_rows * context - num_rows * (num_rows - 1) // 2
    case = partial(
        KernelCase,
        f"prefill attention, {num_rows:,} new of {context:,} tokens",
        step.num_bytes,
        True,
        len(step.pools),
        step.attend,
        num_flops=4 * pairs * shape.num_heads * shape.head_dim,
    )
    if num_rows < context:
        return case(lambda: step.attend(0, "reference"), tuple(_flashinfer(step)))
    # The reference would need memory for all scores at once, so SDPA is the twin.
    whole = partial(step.contiguous, is_causal=True)
    peers = (Peer("SDPA, contiguous KV, causal", whole), *_flashinfer(step))
    return case(lambda: whole(0), peers)


class _AttentionStep:
    """New tokens of equally long sequences, and their KV, paged and contiguous.

    Has enough sets of KV (`Place.copies`) to exceed the cache.
    """

    def __init__(
        self, shape: KernelShape, place: Place, context: int, num_rows: int, num_sequences: int = 1
    ) -> None:
        self.shape, self.context = shape, context
        self.num_rows, self.num_sequences = num_rows, num_sequences
        blocks = -(-context // BLOCK_SIZE)
        size = (num_sequences * blocks + 1, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        tokens = num_sequences * context
        self.num_bytes = 2 * tokens * shape.num_kv_heads * shape.head_dim * place.dtype.itemsize
        copies = place.copies(self.num_bytes)
        self.pools = [(place.random(*size), place.random(*size)) for _ in range(copies)]
        self.query = place.random(num_sequences * num_rows, shape.num_heads, shape.head_dim)
        order = torch.randperm(num_sequences * blocks, dtype=torch.int32, device=place.device) + 1
        self.tables = order.view(num_sequences, blocks)
        lengths = (num_rows,) * num_sequences, (context,) * num_sequences
        self.sequences = PagedSequences(*lengths, self.tables, BLOCK_SIZE)
        self.scale = shape.head_dim**-0.5
        self._contiguous = [_gathered(pair, self.tables, context) for pair in self.pools]

    def attend(self, index: int, impl: str = "auto") -> torch.Tensor:
        pools = self.pools[index]
        return paged_attention(self.query, *pools, self.sequences, Scoring(self.scale), impl)

    def contiguous(self, index: int, is_causal: bool = False) -> torch.Tensor:
        """Return SDPA's result for the same data, [num_sequences * num_rows, num_heads, dim]."""
        key, value = self._contiguous[index]
        rows = self.query.unflatten(0, (self.num_sequences, self.num_rows)).transpose(1, 2)
        out = functional.scaled_dot_product_attention(
            rows, key, value, is_causal=is_causal, scale=self.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


def _gathered(
    pools: tuple[torch.Tensor, torch.Tensor], tables: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as [num_sequences, num_kv_heads, context, dim], contiguous."""
    key, value = (
        pool[tables.long()].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()
        for pool in pools
    )
    return key, value


def has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def _flashinfer(step: _AttentionStep) -> Iterator[Peer]:
    """Yield FlashInfer's kernel on the same blocks, if it is installed."""
    if not has_flashinfer():
        return
    device, blocks = step.query.device, step.tables.shape[1]
    flashinfer: Any = importlib.import_module("flashinfer")
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    counts = torch.arange(step.num_sequences + 1, dtype=torch.int32, device=device)
    last = (step.context - 1) % BLOCK_SIZE + 1
    wrapper.plan(
        counts * step.num_rows,
        counts * blocks,
        step.tables.flatten(),
        torch.full((step.num_sequences,), last, dtype=torch.int32, device=device),
        step.shape.num_heads,
        step.shape.num_kv_heads,
        step.shape.head_dim,
        BLOCK_SIZE,
        causal=True,
        sm_scale=step.scale,
        q_data_type=step.query.dtype,
        kv_data_type=step.query.dtype,
    )
    yield Peer("FlashInfer", lambda i: wrapper.run(step.query, step.pools[i]))


_ROWS = (1, 5, 16)


def case_groups(
    shape: KernelShape, place: Place, contexts: tuple[int, ...]
) -> Iterator[tuple[str, Iterator[KernelCase]]]:
    """Yield groups of cases by name; a group whose data do not fit in memory raises by itself.

    The caller drops each case before the next allocates memory.
    """
    yield "rows", _row_cases(shape, place)
    yield "block copies", _block_copies(shape, place)
    yield "products", _products(shape, place)
    yield "products in 8 and 4 bits", _block_products(shape, place)
    yield "experts in 4 bits", _experts(shape, place)
    yield "samplers", _samplers(shape, place)
    for context in contexts:
        yield f"attention on {context:,} tokens", attention_cases(shape, place, context)


def _row_cases(shape: KernelShape, place: Place) -> Iterator[KernelCase]:
    yield _norm(shape, place)
    yield _gate(shape, place)
    for num_rows in (1, 512):
        yield _rope(shape, place, num_rows)


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
    # Block ids on the device: a graph cannot capture a copy from the host.
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
        yield _product(f"{name}, 1 row", weights, place.random(1, in_size))


def _product(name: str, weights: list[torch.Tensor], row: torch.Tensor) -> KernelCase:
    return KernelCase(
        name,
        weights[0].nbytes,
        True,
        len(weights),
        lambda i: one_row_linear(row, weights[i]),
        lambda: one_row_linear(row, weights[0], impl="reference"),
        (Peer("torch's linear", lambda i: functional.linear(row, weights[i])),),
    )


def _block_products(shape: KernelShape, place: Place) -> Iterator[KernelCase]:
    """Yield the products of the largest matrix of a layer, with weights in blocks."""
    out_size, in_size = 2 * shape.intermediate, shape.hidden
    for bits in (8, 4):
        weight = quantised_on(place.random(out_size, in_size), bits, place.device)
        copies = place.copies(weight.num_bytes)
        weights = [weight, *(_copied(weight) for _ in range(copies - 1))]
        for num_rows in _ROWS:
            name = f"gate and up in {bits} bits, {num_rows} rows"
            yield _block_product(name, weights, place.random(num_rows, in_size))


def _copied(weight: BlockWeights) -> BlockWeights:
    """Return a copy of a matrix at another place."""
    return reordered(weight, torch.arange(weight.num_out, device=weight.device))


def _block_product(name: str, weights: list[BlockWeights], rows: torch.Tensor) -> KernelCase:
    return KernelCase(
        name,
        weights[0].num_bytes,
        True,
        len(weights),
        lambda i: block_linear(rows, weights[i]),
        lambda: block_linear(rows, weights[0], impl="reference"),
    )


def _experts(shape: KernelShape, place: Place) -> Iterator[KernelCase]:
    """Yield the experts of a mixture in 4 bits, as wide together as the model's own layer."""
    width = max(COLUMNS, shape.intermediate // _NUM_EXPERTS // COLUMNS * COLUMNS)
    sizes = {"gate up": (2 * width, shape.hidden), "down": (shape.hidden, width)}
    whole = [
        quantised_on(place.random(_NUM_EXPERTS * out_size, in_size), 4, place.device)
        for out_size, in_size in sizes.values()
    ]
    num_bytes = sum(part.num_bytes for part in whole) // _NUM_EXPERTS
    copies = place.copies(_TOP_K * num_bytes)
    sets = [whole, *([_copied(part) for part in whole] for _ in range(copies - 1))]
    for num_rows in _ROWS:
        places = torch.arange(num_rows * _TOP_K, device=place.device)
        chosen = (5 * places % _NUM_EXPERTS).view(num_rows, _TOP_K)
        rows = place.random(num_rows, shape.hidden) / shape.hidden
        yield _expert_case(rows, chosen, place.random(num_rows, _TOP_K).abs(), sets)


def _gated(both: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return silu_mul(*both.chunk(2, dim=1))


def _expert_case(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    factors: torch.Tensor,
    sets: list[list[BlockWeights]],
) -> KernelCase:
    def computed(index: int, impl: str = "auto") -> torch.Tensor:
        gate_up, down = sets[index]
        return block_experts(rows, chosen, factors, (gate_up,), down, _gated, impl=impl)

    num_bytes = sum(part.num_bytes for part in sets[0]) // _NUM_EXPERTS
    return KernelCase(
        f"{_TOP_K} of {_NUM_EXPERTS} experts in 4 bits, {len(rows)} rows",
        num_bytes * min(chosen.numel(), _NUM_EXPERTS),
        True,
        len(sets),
        computed,
        lambda: computed(0, "reference"),
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
