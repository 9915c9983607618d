"""Which KV `--kv-dtype auto` means: the model's dtype, and fewer bits only where memory demands it.

Memory demands it where the context that is wanted does not fit into the memory for KV. Then the
model takes the most bits that fit, of those that hardly change what it predicts; none is taken that
was not measured.
"""

from dataclasses import dataclass, replace

from kvchat.cache.kv_pool import KvGeometry
from kvchat.cache.state_manager import state_blocks
from kvchat.core.config import CacheConfig
from kvchat.core.errors import ModelError
from kvchat.core.parameters import KV_CODES
from kvchat.core.text import format_bytes
from kvchat.core.types import Memory
from kvchat.engine.kv_effect import effect_on_model
from kvchat.engine.kv_storage import device_budget, kv_geometry, require_kv_dtype, tokens_within
from kvchat.model.device import dtype_name
from kvchat.model.loader import LoadedModel
from kvchat.model.state import state_bytes
from kvchat_kernels.kv_code import FP8

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

    state = state_bytes(loaded.spec.state, loaded.dtype)

    def has_room(geometry: KvGeometry) -> bool:
        fitting = tokens_within(loaded.spec, geometry, config, loaded.device, budget)
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
