"""The self-test compares the paged forward pass with the model's own.

It runs 35 tokens through the model's own attention, and again paged, in chunks, beside a second
sequence: through the model's modules, and through the compiled step where there is one. Only this
test finds models that keep positions or state outside attention. It costs a few forward passes, so
a pass is stored under configuration, dtype, device and versions. Where KV has another form than the
model's own numbers, the compiled step, or the fused layers of a GPU, run over that form too, beside
the modules over the same. Packed weights on a GPU, which both paths multiply with by the same
kernels, are tested by themselves first.
"""

import hashlib
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
import transformers

from kvchat.core.config import CacheConfig
from kvchat.core.errors import KvchatError, ModelError, ModelUnsupported
from kvchat.core.types import Memory
from kvchat.model.batch import SequencePiece
from kvchat.model.device import dtype_name, machine_name
from kvchat.model.hf.module_adapter import own_attention
from kvchat.model.loader import IN_BLOCKS, LoadedModel
from kvchat.model.packed.product_test import device_forms, product_fault
from kvchat.model.paged_model import KvLayers, model_over
from kvchat_kernels.kv_layer import PlainKv

# Makes KV for all storing layers of a model: so many blocks, of so many tokens.
NewKv = Callable[[int, int], KvLayers]
OwnLogits = Callable[[], torch.Tensor]

_log = logging.getLogger(__name__)

# As usual, because kernels are compiled for it: attention over other blocks took 0.6 s more of a
# first start.
_BLOCK_SIZE = CacheConfig().block_size
# Tokens of the tested sequence and of the other in each step: steps of a row, a step that begins
# with a block, and in the last one more rows than a job of the compiled attention. Of a model of 8
# B in 4 bits, on two cores, 100 rows take 4 s.
_STEPS = ((9, 3), (7, 1), (1, 2), (1, 1), (17, 4))
# Modules beside a compiled step run large steps only.
_LARGE_STEPS = ((16, 9), (19, 0))
NUM_TOKENS = sum(length for length, _ in _STEPS)  # of a sequence
# Increase it when a compiled step or fused layers compute otherwise, or the test does: models that
# passed before are tested again.
_CODE_VERSION = 14
_KIND = "self-test"
# The second is the verdict on a model that passes only without fused code or the compiled step.
_PASSES, _PASSES_PLAIN = "passes", "passes plain"
# In float32 only rounding may differ: a position that is wrong by a constant costs as little as
# 0.00005. Copies of the weights in 8 bits cost as much, in fused code; beside 4 bits activations
# that differ in their last bits may be rounded to other levels of 8 bits. In low precision every
# logit may differ a little, and a mixture of experts may differ much in a few rows where two
# experts have nearly equal scores. Most rows keep their direction.
_MIN_SIMILARITY = {torch.float32: 0.999999, torch.bfloat16: 0.98, torch.float16: 0.99}
_MIN_SIMILARITY_OF_COPIES = {"int8": 0.9999, "int4": 0.99, "blocks": 0.99}
# Of KV that is rounded: where two paths differ in a key's last bit, it may go to another level.
# In float32 tiny models with heads of 64 to 256 differed by 0.00004 at most.
_MIN_SIMILARITY_OF_ROUNDED_KV = 0.999
# How many times as far from plain KV a faster path over rounded KV may be as the modules over it.
_MOST_TIMES_OFF = 2


def ensure_trusted(loaded: LoadedModel, memory: Memory) -> None:
    """Run the self-test unless a verdict in `memory` says that it passes; store the verdict there.

    Raises ModelUnsupported if the outputs differ, ModelError if the logits are NaN.
    """
    key = _verdict_key(loaded)
    known, verdict = memory.get(_KIND, key), _PASSES
    if known == _PASSES:
        return
    _require_products(loaded)
    faster = loaded.fusing or loaded.compiled
    if faster is None:
        _require_pass(loaded)
    elif known == _PASSES_PLAIN:
        faster.abandon()
        return
    else:
        own = None
        if loaded.compiled is not None:
            # Meanwhile the modules are tested: they run large steps in any case.
            loaded.compiled.begin([PlainKv(*pool) for pool in _small_pools(loaded, 1)])
            own = cache(lambda: _own_logits(loaded, torch.tensor(_random_ids(loaded)[0])))
            _require_pass(loaded, compiled=False, own=own)
        if not _passes(loaded, own):
            faster.abandon()
            verdict = _PASSES_PLAIN
            if loaded.fusing is not None or loaded.spec.state:
                _require_pass(loaded)
    memory.set(_KIND, key, verdict)


def ensure_faster_reads(loaded: LoadedModel, kv_name: str, new_kv: NewKv, memory: Memory) -> None:
    """Compare the compiled step, or fused layers, over another form of KV, `kv_name`, with the
    modules over the same.

    If they differ or fail, they are abandoned, and that is logged: the modules run every step
    then. For a model that `ensure_trusted` has passed; results are stored as there.
    """
    faster = loaded.fusing or loaded.compiled
    if faster is None or faster.is_off:
        return
    key = _verdict_key(loaded, kv_name)
    verdict = memory.get(_KIND, key)
    if verdict not in (_PASSES, _PASSES_PLAIN):
        verdict = _PASSES if _agrees_over(loaded, kv_name, new_kv) else _PASSES_PLAIN
        memory.set(_KIND, key, verdict)
    if verdict == _PASSES_PLAIN:
        faster.abandon()


def _agrees_over(loaded: LoadedModel, kv_name: str, new_kv: NewKv) -> bool:
    """Return whether the compiled step, or fused layers, agree with the modules over such KV."""
    ids = _random_ids(loaded)

    def by_modules(new_kv: NewKv | None) -> torch.Tensor:
        with loaded.fusing.paused() if loaded.fusing is not None else nullcontext():
            return _paged_logits(loaded, *ids, compiled=False, new_kv=new_kv)

    plain = by_modules(new_kv)
    try:
        faster = _paged_logits(loaded, *ids, new_kv=new_kv)
        similarity = _similarity(loaded, plain, faster)
        if similarity >= min(_least(loaded), _MIN_SIMILARITY_OF_ROUNDED_KV):
            return True
        # Numbers of 4 bits often lie at the middle of two levels, and fall on either side.
        own = by_modules(None)
        off, off_by_modules = (1 - _similarity(loaded, own, x) for x in (faster, plain))
        if off <= _MOST_TIMES_OFF * off_by_modules:
            return True
        problem = f"similarity={similarity:.6f}"
    except Exception as error:  # as in `_passes`
        problem = repr(error)
    what = "compiled step" if loaded.fusing is None else "fused layers"
    model_type = loaded.spec.model_type
    _log.warning("self-test model=%s %s over kv=%s: %s", model_type, what, kv_name, problem)
    return False


def _passes(loaded: LoadedModel, own: OwnLogits | None) -> bool:
    """Test the model with fused code or the compiled step; without them it is only slower."""
    try:
        similarity = compare_with_own(loaded, own=own)
        if similarity >= _least(loaded):
            return True
        problem = f"similarity={similarity:.6f}"
    except Exception as error:  # model code raises any type when parts of it are replaced
        problem = repr(error)
    _log.warning("self-test model=%s faster: %s", loaded.spec.model_type, problem)
    return False


def _require_pass(loaded: LoadedModel, compiled: bool = True, own: OwnLogits | None = None) -> None:
    """Test the model as it is; raises ModelError or ModelUnsupported if it fails."""
    try:
        similarity = compare_with_own(loaded, compiled, own)
    except (KvchatError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # model code raises any type when it meets a cache
        raise ModelUnsupported(
            f"The architecture {loaded.spec.architecture} is not supported: its forward pass over "
            "a paged cache failed.",
            "It probably needs inputs beside tokens. Decoders run instead, such as Llama or Qwen.",
        ) from error
    _log.info("self-test model=%s similarity=%.6f", loaded.spec.model_type, similarity)
    if math.isnan(similarity):
        raise ModelError(
            f"{loaded.source.name} computes NaN in {dtype_name(loaded.dtype)}.",
            "Its weights are damaged, or need another --dtype.",
        )
    if similarity < _least(loaded):
        raise ModelUnsupported(
            f"The architecture {loaded.spec.architecture} is not supported: computed over a paged "
            f"cache its output differs from its own (similarity {similarity:.5f}).",
            "It probably keeps positions or state outside its attention.",
        )


def _require_products(loaded: LoadedModel) -> None:
    """Test the kernels of packed weights on a GPU; raises ModelUnsupported if they fail."""
    try:
        fault = product_fault(loaded.module, loaded.dtype)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a compiler of kernels raises many types
        _log.warning("self-test of packed weights: %r", error)
        fault = f"packed weights at all: its kernels raise {type(error).__name__}"
    if fault is not None:
        way = "--dtype bfloat16" if loaded.weights == IN_BLOCKS else "--weights auto"
        raise ModelUnsupported(
            f"This GPU does not multiply rightly with {fault}.",
            f"Give {way}: the weights are in 16 bits then.",
        )


def _least(loaded: LoadedModel) -> float:
    """Return the least similarity that passes."""
    least = _MIN_SIMILARITY[loaded.dtype]
    return min(least, _MIN_SIMILARITY_OF_COPIES.get(loaded.weights, 1.0))


def compare_with_own(
    loaded: LoadedModel, compiled: bool = True, own: OwnLogits | None = None
) -> float:
    """Return the similarity of paged and own logits over 35 random tokens.

    The smallest over the rows in float32, the median in low precision; NaN if any logit is NaN.
    Without `compiled` all steps are left to the modules. `own` returns the model's own logits, for
    tests that share them.
    """
    one, other = _random_ids(loaded)
    expected = own() if own is not None else _own_logits(loaded, torch.tensor(one))
    return _similarity(loaded, expected, _paged_logits(loaded, one, other, compiled))


def _random_ids(loaded: LoadedModel) -> tuple[list[int], list[int]]:
    """Return two sequences of the test's length; the same for a vocabulary every time."""
    generator = torch.Generator().manual_seed(0)
    limit = min(loaded.spec.vocab_size, 1 << 15)
    ids = torch.randint(0, limit, (2, NUM_TOKENS), generator=generator)
    padding = getattr(loaded.module.config.get_text_config(), "pad_token_id", None)
    if padding is not None:  # some models do not count padding as a position
        ids[ids == padding] = (padding + 1) % limit
    return ids[0].tolist(), ids[1].tolist()


def _similarity(loaded: LoadedModel, logits: torch.Tensor, others: torch.Tensor) -> float:
    """Return the similarity of two passes' logits, [rows, vocab], as `compare_with_own` does.

    That of two rows is the cosine if they are equally long. A longer one counts as a difference: a
    factor of all logits changes no direction, but what is drawn.
    """
    one, other = _centred(logits), _centred(others)
    longer = torch.maximum(one.square().sum(dim=1), other.square().sum(dim=1))
    differences = (one - other).square().sum(dim=1)
    similarities = 1 - differences / (2 * longer.clamp(min=torch.finfo(torch.float32).tiny))
    in_full = loaded.dtype == torch.float32
    return float(similarities.min() if in_full else similarities.median())


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Return logits without each row's mean, which says nothing and would hide differences."""
    return logits - logits.mean(dim=1, keepdim=True)


def _own_logits(loaded: LoadedModel, token_ids: torch.Tensor) -> torch.Tensor:
    with own_attention(loaded.module), torch.inference_mode():
        output = loaded.module(input_ids=token_ids[None].to(loaded.device), use_cache=False)
    return output.logits[0].float().cpu()


def _paged_logits(
    loaded: LoadedModel,
    one: list[int],
    other: list[int],
    compiled: bool = True,
    new_kv: NewKv | None = None,
) -> torch.Tensor:
    """Return the logits of every token of `one`, with tokens of `other` in the same steps.

    KV is plain, in the model's dtype, if there is no `new_kv`.
    """
    is_beside_compiled = not compiled and loaded.compiled is not None and not loaded.compiled.is_off
    if not compiled:
        loaded = replace(loaded, compiled=None)
    # Rounded KV depends on the steps, so that both paths over it take the same.
    steps = _LARGE_STEPS if is_beside_compiled and new_kv is None else _STEPS
    blocks_each = -(-len(one) // _BLOCK_SIZE)
    num_blocks = 1 + 2 * blocks_each
    pools = new_kv(num_blocks, _BLOCK_SIZE) if new_kv else _small_pools(loaded, num_blocks)
    model = model_over(loaded, pools)
    tables = (range(1 + blocks_each, 1 + 2 * blocks_each), range(1, 1 + blocks_each))
    # A state must survive the steps of the other sequence, in the same step or in another.
    states = (model.new_state(), model.new_state())
    rows, starts = [], [0, 0]
    for step in steps:
        pieces = []
        for at, (ids, length) in enumerate(zip((other, one), reversed(step), strict=True)):
            new = ids[starts[at] :][:length]
            if new:
                num_rows = length if ids is one else 0
                pieces.append(SequencePiece(new, starts[at], tables[at], num_rows, states[at]))
            starts[at] += length
        rows.append(model.forward_pieces(pieces, _BLOCK_SIZE).cpu())
    return torch.cat(rows)


def _small_pools(loaded: LoadedModel, num_blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def zeros(num_heads: int, dim: int) -> torch.Tensor:
        shape = (num_blocks, _BLOCK_SIZE, num_heads, dim)
        return torch.zeros(shape, dtype=loaded.dtype, device=loaded.device)

    return [
        (zeros(layer.num_kv_heads, layer.key_dim), zeros(layer.num_kv_heads, layer.value_dim))
        for layer in loaded.spec.storing_layers
    ]


def _verdict_key(loaded: LoadedModel, kv_name: str = "") -> str:
    facts = (
        str(_CODE_VERSION),
        loaded.module.config.to_json_string(),
        str(loaded.dtype),
        " ".join((loaded.weights, *loaded.in_8)),
        # What passed by its modules says nothing of a step that it has since.
        "modules" if (loaded.fusing or loaded.compiled) is None else "faster",
        *device_forms(loaded.module),
        machine_name(loaded.device),
        transformers.__version__,
        *([f"kv {kv_name}"] if kv_name else ()),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
