"""Which KV `--kv-dtype auto` means, and what KV in few bits does to a model's predictions.

It is the model's dtype, and fewer bits only where memory demands it: where the context that is
wanted does not fit into the memory for KV. Then the model takes the most bits that fit, of those
that hardly change what it predicts; none is taken that was not measured.

A model that reads a short text predicts after every token; over plain KV, and over KV in a code.
Small dense models suffer most from few bits, and no rule tells which, so every model is measured,
once. The result is kept in the memory.
"""

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from kvchat.cache.kv_pool import CodedFormat, KvGeometry, PlainFormat
from kvchat.cache.state_manager import state_blocks
from kvchat.core.config import CacheConfig
from kvchat.core.errors import ModelError
from kvchat.core.parameters import KV_CODES
from kvchat.core.text import format_bytes
from kvchat.core.types import Memory
from kvchat.engine.kv_storage import (
    device_budget,
    kv_geometry,
    pool_budget,
    require_kv_dtype,
    small_kv,
    tokens_within,
)
from kvchat.model.batch import SequencePiece
from kvchat.model.device import dtype_name
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import model_over
from kvchat.model.rounding import (
    Effect,
    effect_between,
    effect_of,
    num_sample_tokens,
    refuse_bad,
    sample_ids,
)
from kvchat.model.state import state_bytes
from kvchat_kernels.kv_code import CODES, FP8, INT8, KvCode

_log = logging.getLogger(__name__)

# The kind of its facts in the memory.
_KIND = "kv_effect"
# Blocks and rows of the steps that measure.
_BLOCK_SIZE, _ROWS = 16, 64
# The context that is wanted where the user does not say: a long conversation.
_USUAL_TOKENS = 8192
# The largest divergence, in nats a token, of a code that `auto` may choose.
_MOST_CHANGE = 0.03
# `fp8` has the bytes of `int8`, and is never better.
_CODES = tuple(code for code in KV_CODES if code != FP8.name)
# Blocks that hold no context: the scratch block, and the verifier's spare one. Of a model with
# recurrent state there are those of a snapshot too.
_SPARE_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class KvChoice:
    """The settings with the KV that was chosen, and a sentence with the reason, "" without one."""

    config: CacheConfig
    reason: str = ""


def chosen_kv(
    loaded: LoadedModel, config: CacheConfig, max_context: int | None, memory: Memory
) -> KvChoice:
    """Return the settings of a model's KV with a code in place of `auto`, if memory demands one.

    `max_context` is what the user asked for. The model may be bound to other KV afterwards.
    """
    if config.kv_dtype != "auto" or not loaded.spec.storing_layers:
        return KvChoice(config)
    wanted = min(loaded.max_context, max_context or _USUAL_TOKENS)
    budget = device_budget(config, loaded.device)
    of_pools = pool_budget(loaded.spec, loaded.dtype, budget)
    state = state_bytes(loaded.spec.state, loaded.dtype)

    def has_room(geometry: KvGeometry) -> bool:
        fitting = tokens_within(loaded.spec, geometry, config, loaded.device, of_pools)
        num_other_blocks = _SPARE_BLOCKS + state_blocks(geometry, state)
        return fitting - num_other_blocks * config.block_size >= wanted

    own = kv_geometry(loaded.spec, config, loaded.dtype)
    if has_room(own):
        return KvChoice(config)
    chosen = config
    for code in _CODES:
        coded = replace(config, kv_dtype=code)
        geometry = kv_geometry(loaded.spec, coded, loaded.dtype)
        if _is_good(loaded, coded, geometry, memory):
            chosen = coded
            if has_room(geometry):
                break
    if chosen is config:
        return KvChoice(config)
    return KvChoice(
        chosen,
        f"KV is kept in {chosen.kv_dtype}, as {wanted:,} tokens in {dtype_name(own.dtype)} take "
        f"more than {format_bytes(budget)}.",
    )


def _is_good(
    loaded: LoadedModel, config: CacheConfig, geometry: KvGeometry, memory: Memory
) -> bool:
    try:
        require_kv_dtype(loaded.source.name, loaded.spec, config)
    except ModelError:
        return False
    effect = effect_on_model(loaded, geometry, memory)
    return effect is not None and effect.divergence <= _MOST_CHANGE


def kv_notes(
    loaded: LoadedModel, geometry: KvGeometry, memory: Memory, reason: str = ""
) -> tuple[str, ...]:
    """Return what the user should know of KV in a code: what it changes.

    `reason` says why it was chosen, "" if the user did. Raises ModelError if the model would answer
    otherwise too often, unless the user insists by `ROUNDING_VARIABLE`. The model may be bound to
    other KV afterwards.
    """
    if not isinstance(geometry.format, CodedFormat):
        return ()
    code = geometry.format.code
    effect = effect_on_model(loaded, geometry, memory)
    if effect is None:
        return ()
    others = "auto" if code == INT8 else "int8"
    refuse_bad(effect, loaded.source.name, _sentence(effect, code), f"--kv-dtype {others}")
    return (f"{reason} {_sentence(effect, code)}".lstrip(),)


def effect_on_model(loaded: LoadedModel, geometry: KvGeometry, memory: Memory) -> Effect | None:
    """Return what KV in the code of `geometry` changes, measured now or earlier; None for a model
    whose tokenizer cannot read the text.

    The model may be bound to other KV afterwards.
    """
    assert isinstance(geometry.format, CodedFormat)
    key = _key(loaded.identity, loaded.weights, loaded.dtype, geometry.format.code)
    return effect_of(memory.get(_KIND, key)) or _measured(loaded, geometry, key, memory)


def known_sentence(identity: str, dtype: torch.dtype, code: str, memory: Memory) -> str:
    """Return what a code was seen to change of a model with its own weights, whose files have the
    digest `identity`; "" if that was not measured.
    """
    for weights in ("own", "blocks", "auto"):
        effect = effect_of(memory.get(_KIND, _key(identity, weights, dtype, CODES[code])))
        if effect is not None:
            return _sentence(effect, CODES[code])
    return ""


def _sentence(effect: Effect, code: KvCode) -> str:
    changed = f"{1 - effect.same:.0%} of {effect.num_tokens} likeliest tokens"
    return f"KV in {code.name} changes {changed} (KL {effect.divergence:.4f})."


def _key(identity: str, weights: str, dtype: torch.dtype, code: KvCode) -> str:
    facts = (identity, weights, str(dtype), code.stored_name)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _measured(loaded: LoadedModel, geometry: KvGeometry, key: str, memory: Memory) -> Effect | None:
    """Measure, and keep the result; None for a model whose tokenizer cannot read the text."""
    try:
        ids = sample_ids(loaded.source, num_sample_tokens(loaded.spec))
    except Exception as error:  # tokenizers raises any kind
        name = type(error).__name__
        _log.info("KV not measured model=%s: %s", loaded.spec.model_type, name)
        return None
    ids = ids[: loaded.max_context]
    plain = replace(geometry, format=PlainFormat())
    own = list(_predictions(loaded, plain, ids))
    effect = effect_between(zip(own, _predictions(loaded, geometry, ids), strict=True))
    memory.set(_KIND, key, asdict(effect))
    return effect


def _predictions(
    loaded: LoadedModel, geometry: KvGeometry, ids: list[int]
) -> Iterator[torch.Tensor]:
    """Yield the logits after every token, a few rows at a time, over new KV."""
    blocks = range(1, 2 + len(ids) // _BLOCK_SIZE)
    pools = small_kv(geometry, loaded.device, 1 + len(blocks), _BLOCK_SIZE)
    model = model_over(loaded, pools)
    state = model.new_state()
    for start in range(0, len(ids), _ROWS):
        rows = ids[start : start + _ROWS]
        piece = SequencePiece(rows, start, blocks, len(rows), state)
        yield model.forward_pieces([piece], _BLOCK_SIZE).cpu()
