"""How a model's KV is stored: its form, its identity, and the memory that it may take.

All follow from the model and the settings. Stored KV of another identity is never read.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch

from kvchat.cache.kv_pool import (
    CodedFormat,
    KvFormat,
    KvGeometry,
    KvPool,
    LayerGeometry,
    PlainFormat,
)
from kvchat.cache.windowed_manager import most_in_use
from kvchat.cache.windowed_pool import WindowedKvPool, Windows
from kvchat.core.config import CacheConfig
from kvchat.core.errors import ModelError
from kvchat.core.text import Size, format_bytes
from kvchat.model.checkpoint.identity import state_code
from kvchat.model.device import dtype_name, dtype_of, free_bytes
from kvchat.model.loader import LoadedModel
from kvchat.model.packed.experts import has_packed_experts
from kvchat.model.spec import ModelSpec
from kvchat.model.state import state_bytes
from kvchat_kernels.kv_code import CODES
from kvchat_kernels.kv_layer import KvLayer

# Increase it if the content of a slot changes for the same token by more than rounding, which the
# check of restored KV allows for: with the layout of a block image, or with the values that the
# attention writes. 5: prompts are computed as answers are, so that a cached one gets the same
# answer as one that is read anew.
_KV_VERSION = 5

_DEFAULT_SHARE = {"cpu": Size(share=0.25), "cuda": Size(share=0.80)}
# On a CPU, the device is host memory: there is no other memory to demote KV to.
_DEFAULT_HOST_SHARE = {"cpu": Size(num_bytes=0), "cuda": Size(share=0.10)}
_MAX_DEFAULT_HOST_BYTES = 16 << 30
# Window blocks beside those of a window and a step: the scratch block, and that of the spare block.
_SPARE_WINDOW_BLOCKS = 2
# The most tokens of a sequence in a step: of a CPU where a model is not loaded to ask, of a GPU at
# any measured rate. The least to which little room for window blocks reduces it.
_USUAL_STEP_TOKENS = {"cpu": 256, "cuda": 4096}
_LEAST_STEP_TOKENS = 256
# Of a running sequence beside the pool: its state, a snapshot that has not entered the pool yet,
# and in a prompt's steps another, or the state before a step with drafts that modules read.
_RUNNING_STATES = 3
# Blocks for the snapshots of a model without attention layers, whose token blocks have no bytes.
_CARRIER_BLOCKS = 256


def kv_identity(
    loaded: LoadedModel,
    geometry: KvGeometry,
    content_digest: str,
    windows: Windows | None = None,
) -> bytes:
    """Return 16 bytes that name the KV a model computes, as this engine stores it.

    With `windows`, images may lack layers with a window.

    With recurrent state they name the code that computes it too (`state_code`); without, KV is
    verified by tokens that are computed again, and outlives the code.
    """
    facts = {
        "version": _KV_VERSION,
        "format": 3,  # once the version of records; another value would orphan all stored KV
        "content": content_digest,
        "dtype": dtype_name(loaded.dtype),
        "weights": loaded.weights,
        "kv_dtype": dtype_name(geometry.dtype),
        "block_size": geometry.block_size,
        "layers": [(x.num_kv_heads, x.key_dim, x.value_dim) for x in geometry.layers],
        "rope": [*loaded.frozen_rope, loaded.max_context] if loaded.frozen_rope else [],
    }
    if loaded.spec.state:
        facts["state"] = [[str(part) for part in asdict(x).values()] for x in loaded.spec.state]
        compiled = loaded.compiled
        facts["code"] = state_code(is_compiled=compiled is not None and not compiled.is_off)
    if (loaded.spec.state or loaded.spec.gathered is not None) and loaded.weights != "auto":
        facts["packed"] = "all linear layers"  # in older stores only those beside attention
    if has_packed_experts(loaded.module):  # a GPU once left experts as they are
        facts["experts"] = loaded.weights
    if loaded.in_8:
        facts["in_8"] = loaded.in_8
    if loaded.spec.gathered is not None:
        facts["path"] = "gathered"
    if windows is not None:
        facts["windows"] = [sorted(windows.layers), windows.num_tokens]
    if geometry.format.name != PlainFormat().name:  # plain KV has no format in its older stores
        facts["kv_format"] = geometry.format.name
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).digest()


def finer_geometries(geometry: KvGeometry) -> dict[str, KvGeometry]:
    """Return the geometries of the same KV in more bits, the finest first, by their names."""
    if not isinstance(geometry.format, CodedFormat):
        return {}
    codes = list(CODES.values())
    finer = codes[: codes.index(geometry.format.code)]
    return {
        dtype_name(geometry.dtype): replace(geometry, format=PlainFormat()),
        **{code.name: replace(geometry, format=CodedFormat(code)) for code in finer},
    }


def kv_geometry(spec: ModelSpec, config: CacheConfig, dtype: torch.dtype) -> KvGeometry:
    """Return the shape and format of the KV pools for a model computing in `dtype`."""
    code = CODES.get(config.kv_dtype)
    kv_dtype = dtype if code is not None else dtype_of(config.kv_dtype) or dtype
    layers = tuple(
        LayerGeometry(layer.num_kv_heads, layer.key_dim, layer.value_dim)
        for layer in spec.storing_layers
    )
    if not layers:
        layers = (_carrier(spec, dtype, config.block_size * kv_dtype.itemsize),)
    kv_format: KvFormat = PlainFormat() if code is None else CodedFormat(code)
    return KvGeometry(layers, kv_dtype, config.block_size, kv_format)


def require_kv_dtype(name: str, spec: ModelSpec, config: CacheConfig) -> None:
    """Raise ModelError if the KV of the model `name` cannot have the code that it is to have."""
    code = CODES.get(config.kv_dtype)
    if code is None:
        return
    unfit = [x for x in spec.storing_layers if not code.takes(x.key_dim, x.value_dim)]
    hint = "Use --kv-dtype auto."
    if not spec.storing_layers:
        reason = "it has no attention, and so no KV"
    elif unfit:
        dim = next(dim for dim in (unfit[0].key_dim, unfit[0].value_dim) if dim % 16)
        reason, hint = f"its heads of {dim} numbers are no multiple of 16", "Use --kv-dtype int8."
    else:
        return
    raise ModelError(f"--kv-dtype {code.name} does not work with {name}: {reason}.", hint)


def small_kv(
    geometry: KvGeometry, device: torch.device, num_blocks: int, block_size: int
) -> Sequence[KvLayer]:
    """Return KV of a model for a test: so many blocks, of so many tokens, in its format."""
    return KvPool(replace(geometry, block_size=block_size), num_blocks, device).layers


def _carrier(spec: ModelSpec, dtype: torch.dtype, bytes_an_element: int) -> LayerGeometry:
    """Return a layer for a model without attention: its blocks hold snapshots of state only.

    Blocks of tokens stay empty, so blocks are small; a snapshot takes `_CARRIER_BLOCKS` of them.
    """
    block_bytes = state_bytes(spec.state, dtype) / _CARRIER_BLOCKS
    width = max(1, math.ceil(block_bytes / 2 / bytes_an_element))
    return LayerGeometry(1, width, width)


def device_budget(config: CacheConfig, device: torch.device) -> int:
    """Return the bytes KV may take on `device`."""
    size = config.device_bytes or _DEFAULT_SHARE[device.type]
    return size.resolve(free_bytes(device))


def pool_budget(spec: ModelSpec, dtype: torch.dtype, budget: int) -> int:
    """Return the bytes that the pools of a model computing in `dtype` may take of a budget.

    The rest, a quarter at most, is for the recurrent states of a running sequence. Those of others
    that run beside it are not in the budget.
    """
    return budget - min(budget // 4, _RUNNING_STATES * state_bytes(spec.state, dtype))


def host_budget(config: CacheConfig, device: torch.device) -> int:
    """Return the bytes KV may take in host memory beside `device`."""
    size = config.host_bytes or _DEFAULT_HOST_SHARE[device.type]
    num_bytes = size.resolve(free_bytes(torch.device("cpu")))
    return num_bytes if config.host_bytes else min(num_bytes, _MAX_DEFAULT_HOST_BYTES)


def kv_windows(spec: ModelSpec, config: CacheConfig) -> Windows | None:
    """Return the layers whose KV is in window blocks; None if there are none."""
    if config.whole_windows:
        return None
    seen: dict[int, list[int | None]] = {}
    for layer in spec.layers:
        seen.setdefault(layer.pool_index, []).append(layer.span.num_visible)
    longest = {
        index: max(count for count in counts if count is not None)
        for index, counts in seen.items()
        if None not in counts
    }
    return Windows(frozenset(longest), max(longest.values())) if longest else None


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks, and window blocks, scratch blocks included."""

    num_blocks: int
    num_window_blocks: int


def tokens_within(
    spec: ModelSpec, geometry: KvGeometry, config: CacheConfig, device: torch.device, budget: int
) -> int:
    """Return how many tokens of one context a budget in bytes has room for."""
    windows = kv_windows(spec, config)
    if windows is None:
        return budget // geometry.token_bytes
    most = largest_step(geometry, windows, budget, device)
    counts = block_counts(geometry, windows, budget, spec.max_context, most)
    return counts.num_blocks * geometry.block_size


def largest_step(
    geometry: KvGeometry, windows: Windows | None, budget: int, device: torch.device
) -> int:
    """Return the most tokens of a sequence in a step: fewer in a small budget, as all of them are
    in window blocks at once.
    """
    most, size = _USUAL_STEP_TOKENS[device.type], geometry.block_size
    if windows is not None:
        room = _share_of_windows(geometry, windows, budget)
        while most > _LEAST_STEP_TOKENS and most_in_use(windows, most, size) > room:
            most //= 2
    return most


def _share_of_windows(geometry: KvGeometry, windows: Windows, budget: int) -> int:
    """Return how many window blocks a third of a budget has."""
    return budget // 3 // _window_bytes(geometry, windows)


def _window_bytes(geometry: KvGeometry, windows: Windows) -> int:
    layers = [geometry.layers[index] for index in windows.layers]
    return sum(geometry.format.block_bytes(layer, geometry) for layer in layers)


def block_counts(
    geometry: KvGeometry, windows: Windows, budget: int, max_context: int, max_step_tokens: int
) -> BlockCounts:
    """Return how many blocks and window blocks a budget in bytes has.

    Window blocks take a third of it, and what one sequence needs at least. With more than one whole
    context takes, each further block has a window block. There are never more window blocks than
    blocks: then all is as if layers had no window.
    """
    size, window_bytes = geometry.block_size, _window_bytes(geometry, windows)
    other_bytes = geometry.block_bytes - window_bytes
    alike = budget // geometry.block_bytes
    least = most_in_use(windows, max_step_tokens, size) + _SPARE_WINDOW_BLOCKS
    num_windows = max(least, _share_of_windows(geometry, windows, budget))
    left, whole = budget - num_windows * window_bytes, -(-max_context // size) + 2
    if not other_bytes:
        num_blocks, num_windows = alike + whole, alike
    elif left > whole * other_bytes:
        more = (left - whole * other_bytes) // geometry.block_bytes
        num_blocks, num_windows = whole + more, num_windows + more
    else:
        num_blocks = max(0, left) // other_bytes
    if num_windows >= num_blocks or num_windows < least:
        return BlockCounts(alike, alike)
    return BlockCounts(num_blocks, num_windows)


def new_windowed_pool(
    loaded: LoadedModel,
    geometry: KvGeometry,
    windows: Windows,
    config: CacheConfig,
    max_step_tokens: int,
) -> WindowedKvPool:
    """Allocate the blocks and window blocks that the budget allows; raises as `new_kv_pool`."""
    device, max_context = loaded.device, loaded.max_context
    budget = pool_budget(loaded.spec, loaded.dtype, device_budget(config, device))
    _require_two_blocks(geometry, config, budget)
    counts = block_counts(geometry, windows, budget, max_context, max_step_tokens)
    num_blocks, num_windows = counts.num_blocks, counts.num_window_blocks
    return _allocated(
        lambda: WindowedKvPool(geometry, windows, num_blocks, num_windows, device), config, budget
    )


def _require_two_blocks(geometry: KvGeometry, config: CacheConfig, budget: int) -> None:
    if budget < 2 * geometry.block_bytes:
        is_chosen = config.device_bytes is not None
        raise ModelError(
            f"{'--device-cache' if is_chosen else 'Memory'} allows {format_bytes(budget)}, less "
            f"than the two blocks of {format_bytes(geometry.block_bytes)} a conversation needs.",
            "Raise it." if is_chosen else "Use a smaller model.",
        )


_OUT_OF_MEMORY = (OSError, MemoryError, OverflowError, torch.OutOfMemoryError)


def _too_much(config: CacheConfig, budget: int) -> ModelError:
    size = format_bytes(budget)
    if config.device_bytes is None:
        return ModelError(f"There is no room for {size} of KV.", "--device-cache takes less.")
    return ModelError(f"--device-cache allows {size}, more than there is.", "Lower it.")


def new_kv_pool(loaded: LoadedModel, geometry: KvGeometry, config: CacheConfig) -> KvPool:
    """Allocate the blocks the budget allows; raises ModelError if it is too small or too large."""
    device = loaded.device
    budget = pool_budget(loaded.spec, loaded.dtype, device_budget(config, device))
    _require_two_blocks(geometry, config, budget)
    num_blocks = budget // geometry.block_bytes
    return _allocated(lambda: KvPool(geometry, num_blocks, device), config, budget)


_Pool = TypeVar("_Pool", bound=KvPool)


def _allocated(new: Callable[[], _Pool], config: CacheConfig, budget: int) -> _Pool:
    try:
        kv_pool = new()
    except _OUT_OF_MEMORY as error:
        raise _too_much(config, budget) from error
    if kv_pool.device.type != "cpu":
        kv_pool.warm_up()
    return kv_pool
