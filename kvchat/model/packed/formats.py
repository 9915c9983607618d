"""Reads quantised checkpoints without their packages: packed tensors become those of the model.

The tensors' names and the configuration say how a weight is packed. Shapes are checked at once; a
weight is unpacked when transformers takes it, so that packed and unpacked weights are never held
whole beside each other.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil, prod
from threading import Lock
from typing import Any

import torch

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.packed import unpacking
from kvchat_kernels.linear.blocks import COLUMNS, BlockWeights, interleaved
from kvchat_kernels.linear.cpu import rounding_beside
from kvchat_kernels.linear.group_reading import read_floats, read_groups
from kvchat_kernels.linear.stored_groups import StoredGroups, WordOrder

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WORDS = (torch.int32, torch.uint32)
_WORD_BITS = 32
_GPTQ_BITS = (2, 3, 4, 8)
_SCALES_OF_OTHERS = (
    *("input_scale", "input_zero_point", "input_global_scale", "input_activation_scale"),
    *("input_scale_ub", "activation_scale", "k_scale", "v_scale"),
)
_WHAT_IS_READ = (
    "kvchat reads GPTQ, AWQ, FP8, MXFP4, NVFP4, compressed-tensors, bitsandbytes and MLX; use one "
    "of these, or the checkpoint that is not quantised."
)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint's weights are packed: the method's name, and its settings as in the file."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The format as people write it, such as `4-bit GPTQ`."""
        bits = self.settings.get("bits")
        name, _ = _METHODS[self.method]
        return f"{bits}-bit {name}" if type(bits) is int and bits > 0 else name


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight that is still packed; indexing it with `...` unpacks it, as transformers does.

    `lock` is shared by a checkpoint's weights: one is unpacked at a time, for memory. `stored` is
    what compiled code reads, of a format that it knows; `make_blocks` returns what
    products read, interleaved if asked for, `are_bytes` that these have 8 bits.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    unpack: Callable[[], torch.Tensor | unpacking.Grouped]
    lock: Lock
    stored: StoredGroups | None = None
    make_blocks: unpacking.MakeBlocks | None = None
    are_bytes: bool = False

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def is_floating_point(self) -> bool:
        return True

    @torch.inference_mode(False)
    def __getitem__(self, index: object) -> torch.Tensor:
        assert index is ..., "a packed weight is unpacked whole"
        with self.lock:
            floats = None if self.stored is None else read_floats(self.stored, self.dtype)
            if floats is not None:
                return floats.reshape(self.shape)
            found = self.unpack()
            weight = found.weight() if isinstance(found, unpacking.Grouped) else found
            return weight.to(self.dtype).reshape(self.shape).contiguous()

    def may_fit_blocks(self) -> bool:
        """Whether `blocks` may return any, told without unpacking."""
        is_even = len(self.shape) == 2 and self.stored is not None and self.stored.fits_blocks()
        return self.make_blocks is not None or is_even

    def blocks(self, for_cpu: bool) -> BlockWeights | None:
        """Return the weight in blocks that hold it exactly; None for a format without.

        They are interleaved for a CPU. Of experts by turns it is a matrix of the outputs of all.
        """
        if self.make_blocks is not None:
            return self.make_blocks(for_cpu)
        if len(self.shape) != 2 or not (self.stored is None or self.stored.fits_blocks()):
            return None  # without unpacking it in vain
        blocks = None if self.stored is None else read_groups(self.stored, for_cpu)
        if blocks is None:
            found = self.unpack()
            blocks = found.blocks() if isinstance(found, unpacking.Grouped) else None
            if blocks is not None and for_cpu:
                blocks = interleaved(blocks, rounding_beside(blocks))
        fits = blocks is not None and (blocks.num_out, blocks.num_in) == self.shape
        return blocks if fits else None


def packing_of(config: Mapping[str, Any], name: str) -> Packing | None:
    """Return how the weights of a checkpoint are packed by its config.json; None if they are not.

    Raises ModelUnsupported for a format that is not read, ModelError for settings that are none.
    """
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, dict) else {}):
        # MLX writes its settings under both names.
        for key in ("quantization", "quantization_config"):
            settings = place.get(key)
            if settings is not None:
                return _packing(settings, key, name)
    return None


def _packing(settings: Any, key: str, name: str) -> Packing:
    if not isinstance(settings, dict):
        raise ModelError(f"{key} in config.json of {name} is not an object.", "Mend config.json.")
    method = str(settings.get("quant_method") or ("mlx" if "group_size" in settings else key))
    packing = settings.get("packing_format")
    if method == "auto-round" and packing in ("auto_round:auto_gptq", "auto_round:auto_awq"):
        method = str(packing).removeprefix("auto_round:auto_")
    if method not in _METHODS:
        raise ModelUnsupported(
            f"The weights of {name} are quantised as {method[:40]!r}, which is not read.",
            _WHAT_IS_READ,
        )
    odd = _odd_variant(method, settings)
    if odd:
        raise ModelUnsupported(
            f"The weights of {name} are {odd}, which is not read.", _WHAT_IS_READ
        )
    return Packing(method, settings)


def _odd_variant(method: str, settings: dict[str, Any]) -> str:
    """Return the name of a layout of a known method that is not read, or ""."""
    layout = settings.get("checkpoint_format", "gptq")
    if method == "gptq" and layout not in ("gptq", "gptq_v2"):
        return f"GPTQ in the layout {str(layout)[:40]!r}"
    layout = settings.get("version", settings.get("format", "gemm"))
    if method == "awq" and str(layout).lower() != "gemm":
        return f"AWQ in the layout {str(layout)[:40]!r}"
    sparsity = settings.get("sparsity_config") or {}
    is_sparse = isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"
    if method == "compressed-tensors" and is_sparse:
        return f"sparse ({str(sparsity.get('format'))[:40]!r})"
    if method == "compressed-tensors" and settings.get("transform_config"):
        return "rotated by compressed-tensors' transforms"
    mode = settings.get("mode", "affine")
    return f"MLX of the mode {str(mode)[:40]!r}" if method == "mlx" and mode != "affine" else ""


def unpacked(
    tensors: dict[str, torch.Tensor], packing: Packing, dtype: torch.dtype, name: str
) -> dict[str, torch.Tensor | PackedTensor]:
    """Return the model's tensors by name; a packed one becomes a PackedTensor of `dtype`.

    Raises ModelError if parts of a packed weight are missing, or do not fit each other.
    """
    table = _Table(dict(tensors), packing, dtype, name)
    _, read = _METHODS[packing.method]
    read(table)
    return {**table.tensors, **table.found}


class _Table:
    """A checkpoint's tensors while packed weights are found among them.

    Readers take the parts of a weight, and add what they make of them to `found`.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], packing: Packing, dtype: torch.dtype, name: str
    ) -> None:
        self.tensors = tensors
        self.settings = packing.settings
        self.dtype = dtype
        self.found: dict[str, PackedTensor] = {}
        self._name = name
        self._lock = Lock()

    def stems(self, ending: str) -> list[str]:
        """Return the names that have this ending, without it."""
        return [name.removesuffix(ending) for name in self.tensors if name.endswith(ending)]

    def take(self, name: str, dims: int, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        """Remove and return a tensor; raises ModelError if it is missing or of another kind."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise self.fault(f"{name} is missing")
        if tensor.dim() != dims or tensor.dtype not in dtypes or not tensor.numel():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise self.fault(f"{name} has {tensor.dim()} dimensions of {kind}")
        return tensor

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        unpack: Callable[[], torch.Tensor | unpacking.Grouped],
        stored: StoredGroups | None = None,
        make_blocks: unpacking.MakeBlocks | None = None,
        are_bytes: bool = False,
    ) -> None:
        if name in self.tensors or name in self.found:
            raise self.fault(f"{name} is there twice, packed and not")
        if stored is not None and (stored.num_out, stored.num_in) != shape:
            stored = None  # the last word of a row has columns that the matrix has not
        reading = (unpack, self._lock, stored, make_blocks, are_bytes)
        self.found[name] = PackedTensor(shape, self.dtype, *reading)

    def check(self, is_right: bool, name: str) -> None:
        """Raise ModelError if the parts of the weight `name` do not fit each other."""
        if not is_right:
            raise self.fault(
                f"the parts of {name} do not fit each other, or not the bits and group size that "
                "config.json gives it"
            )

    def fault(self, what: str) -> ModelError:
        return ModelError(
            f"The packed weights of {self._name} cannot be read: {what}.",
            "Is the download complete, and does config.json belong to these weights?",
        )

    def number(self, key: str, choices: tuple[int, ...]) -> int:
        """Return a setting that must be one of `choices`; raises ModelError."""
        value = self.settings.get(key)
        if type(value) is not int or value not in choices:
            listed = ", ".join(map(str, choices))
            raise self.fault(f"{key} in config.json must be one of {listed}")
        return value


# Each of these reads one method


def _read_gptq(table: _Table) -> None:
    most_bits = table.number("bits", _GPTQ_BITS)
    zero_offset = 0 if table.settings.get("checkpoint_format") == "gptq_v2" else 1
    for stem in table.stems(".qweight"):
        words = table.take(f"{stem}.qweight", 2, _WORDS)
        zeros = table.take(f"{stem}.qzeros", 2, _WORDS)
        scales = table.take(f"{stem}.scales", 2, _FLOATS)
        num_groups, num_out = scales.shape
        bits = _bits_of(zeros.shape[1], num_out, most_bits)
        num_in = len(words) * _WORD_BITS // bits
        table.check(len(words) * _WORD_BITS % bits == 0 and words.shape[1] == num_out, stem)
        table.check(tuple(zeros.shape) == (num_groups, ceil(num_out * bits / _WORD_BITS)), stem)
        sizes = [table.settings.get("group_size")]
        group_of = _group_of(table, stem, num_in, num_groups, sizes)
        unpack = partial(unpacking.gptq, words, zeros, scales, group_of, bits, zero_offset)
        stored = StoredGroups(
            WordOrder.TURNED, bits, words, scales, zeros, None, zero_offset, group_of
        )
        table.add(f"{stem}.weight", (num_out, num_in), unpack, stored)


def _bits_of(num_words: int, count: int, most_bits: int) -> int:
    """Return the bits of a layer with `count` zero points in so many words.

    Layers may have other bits than most of the checkpoint's, by rules such as GPTQModel's `dynamic`
    and AutoRound's `extra_config`.
    """
    fitting = [bits for bits in _GPTQ_BITS if ceil(count * bits / _WORD_BITS) == num_words]
    return most_bits if most_bits in fitting or not fitting else fitting[0]


def _group_of(
    table: _Table,
    stem: str,
    num_in: int,
    num_groups: int,
    given: Iterable[object],
    ending: str = ".g_idx",
) -> torch.Tensor | None:
    """Return the group of each column; None for groups of one size, one after the other.

    `given` are the sizes of groups in config.json: of the last group they may be fewer columns.
    """
    is_even = num_in % num_groups == 0
    if f"{stem}{ending}" not in table.tensors:
        sizes = {size for size in given if type(size) is int and size > 0}
        fitting = {size for size in sizes if ceil(num_in / size) == num_groups}
        if is_even and (not fitting or num_in // num_groups in fitting):
            return None
        table.check(len(fitting) == 1, stem)
        return torch.arange(num_in) // fitting.pop()
    listed = table.take(f"{stem}{ending}", 1, (torch.int32, torch.int64)).long()
    fits = len(listed) == num_in and 0 <= int(listed.min()) <= int(listed.max()) < num_groups
    table.check(fits, stem)
    if is_even and torch.equal(listed, torch.arange(num_in) // (num_in // num_groups)):
        return None
    return listed


def _read_awq(table: _Table) -> None:
    bits = table.number("bits" if "bits" in table.settings else "w_bit", (4,))
    per_word = _WORD_BITS // bits
    for stem in table.stems(".qweight"):
        words = table.take(f"{stem}.qweight", 2, _WORDS)
        zeros = table.take(f"{stem}.qzeros", 2, _WORDS)
        scales = table.take(f"{stem}.scales", 2, _FLOATS)
        num_in, num_out = len(words), words.shape[1] * per_word
        table.check(scales.shape[1] == num_out, stem)
        table.check(tuple(zeros.shape) == (len(scales), words.shape[1]), stem)
        table.check(num_in % len(scales) == 0, stem)
        unpack = partial(unpacking.awq, words, zeros, scales)
        stored = StoredGroups(WordOrder.AWQ, bits, words, scales, zeros)
        table.add(f"{stem}.weight", (num_out, num_in), unpack, stored)


def _read_fp8(table: _Table) -> None:
    block = table.settings.get("weight_block_size")
    if block is not None and not _is_block(block):
        raise table.fault("weight_block_size in config.json is no pair of sizes")
    _read_scaled(table, tuple(block) if block is not None else None)


def _is_block(block: object) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size < 1 << 31 for size in block)
    )


def _read_scaled(table: _Table, block: tuple[int, int] | None) -> None:
    """Read 8-bit values beside a scale: `weight_scale_inv`, which multiplies, or `weight_scale`."""
    for ending in ("_scale_inv", "_scale"):
        for stem in table.stems(ending):
            values = table.tensors.get(stem)
            if values is None or values.dtype not in (*_FP8, torch.int8) or values.dim() < 2:
                continue
            del table.tensors[stem]
            scales = _scales_of(table, f"{stem}{ending}", values)
            zeros = table.tensors.pop(f"{stem}_zero_point", None)
            if zeros is not None:
                table.check(zeros.numel() == scales.numel() and zeros.dtype != torch.bool, stem)
                zeros = zeros.reshape(scales.shape)
            sizes = _block_of(table, stem, values, scales, block)
            unpack = partial(unpacking.scaled, values, scales, sizes, zeros)
            in_blocks = None
            if zeros is None and unpacking.are_float_blocks(values, sizes):
                in_blocks = partial(unpacking.float_blocks, values, scales, sizes)
            table.add(stem, tuple(values.shape), unpack, make_blocks=in_blocks, are_bytes=True)
    # These serve kernels that round activations or keys and values too.
    for name in [n for n in table.tensors if n.rpartition(".")[2] in _SCALES_OF_OTHERS]:
        del table.tensors[name]
    bare = [name for name, tensor in table.tensors.items() if tensor.dtype in _FP8]
    if bare:
        raise table.fault(f"{bare[0]} has no scale")


def _scales_of(table: _Table, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return the scales of `values` with as many dimensions as these; exponents become numbers."""
    scales = table.tensors.pop(name)
    if scales.dtype is torch.uint8:
        scales = unpacking.powers_of_two(scales)
    table.check(scales.is_floating_point() and scales.numel() > 0, name)
    if scales.numel() == 1:
        return scales.reshape((1,) * values.dim())
    if scales.dim() == 1 and values.dim() == 2:
        scales = scales.unsqueeze(-1)
    table.check(scales.dim() == values.dim() and scales.shape[:-2] == values.shape[:-2], name)
    return scales


def _block_of(
    table: _Table,
    name: str,
    values: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int] | None,
) -> tuple[int, int]:
    """Return the rows and columns that one scale covers."""
    sizes = []
    for dim, given in zip((-2, -1), block or (None, None), strict=True):
        size, count = values.shape[dim], scales.shape[dim]
        is_whole = given is None or scales.numel() == 1
        length = size // count if is_whole else given
        table.check(length is not None and length > 0 and ceil(size / length) == count, name)
        sizes.append(length or 1)
    return sizes[0], sizes[1]


def _read_compressed(table: _Table) -> None:
    """Read compressed-tensors, whose groups of modules may be packed in different ways."""
    for stem in table.stems(".weight_packed"):
        if table.tensors[f"{stem}.weight_packed"].dtype is torch.uint8:
            _read_fp4(table, stem)
        else:
            _read_packed_integers(table, stem)
    groups = list(_weight_settings(table, "num_bits"))
    blocks = [
        tuple(block) for block in _weight_settings(table, "block_structure") if _is_block(block)
    ]
    is_alike = len(blocks) == len(groups) and len(set(blocks)) == 1
    _read_scaled(table, blocks[0] if is_alike else None)


def _weight_settings(table: _Table, key: str) -> Iterator[Any]:
    """Yield a setting of the weights in each group of config.json."""
    groups = table.settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get(key) is not None:
            yield weights[key]


def _read_packed_integers(table: _Table, stem: str) -> None:
    words = table.take(f"{stem}.weight_packed", 2, _WORDS)
    scales = table.take(f"{stem}.weight_scale", 2, _FLOATS)
    sizes = table.take(f"{stem}.weight_shape", 1, (torch.int32, torch.int64)).tolist()
    table.check(len(sizes) == 2 and sizes[0] == len(words) == len(scales) and sizes[1] > 0, stem)
    num_out, num_in = sizes
    # Groups of modules may have different bits; the shape says which of these it is.
    listed = {bits for bits in _weight_settings(table, "num_bits") if bits in (4, 8)}
    fitting = [
        bits for bits in sorted(listed) if ceil(num_in * bits / _WORD_BITS) == words.shape[1]
    ]
    table.check(len(fitting) == 1, stem)
    zeros = None
    if f"{stem}.weight_zero_point" in table.tensors:
        zeros = table.take(f"{stem}.weight_zero_point", 2, _WORDS)
        shape = (ceil(num_out * fitting[0] / _WORD_BITS), scales.shape[1])
        table.check(tuple(zeros.shape) == shape, stem)
    group_sizes = _weight_settings(table, "group_size")
    group_of = _group_of(table, stem, num_in, scales.shape[1], group_sizes, ".weight_g_idx")
    unpack = partial(unpacking.packed_integers, words, zeros, scales, group_of, fitting[0], num_in)
    stored = StoredGroups(WordOrder.ROWS, fitting[0], words, scales, zeros, group_of=group_of)
    table.add(f"{stem}.weight", (num_out, num_in), unpack, stored)


def _read_fp4(table: _Table, stem: str) -> None:
    packed = table.take(f"{stem}.weight_packed", 2, (torch.uint8,))
    scales = table.take(f"{stem}.weight_scale", 2, (*_FP8, *_FLOATS, torch.uint8))
    divisor = table.tensors.pop(f"{stem}.weight_global_scale", None)
    _add_fp4(table, stem, packed, scales, None if divisor is None else 1 / divisor.float())


def _add_fp4(
    table: _Table,
    stem: str,
    packed: torch.Tensor,
    scales: torch.Tensor,
    factor: torch.Tensor | None,
) -> None:
    """Add a weight of 4-bit floating-point values; `factor` is one more scale of the whole."""
    num_out, num_in = len(packed), 2 * packed.shape[1]
    table.check(len(scales) == num_out and num_in % scales.shape[1] == 0, stem)
    table.check(factor is None or factor.numel() == 1, stem)
    in_blocks = unpacking.fp4_blocks(packed, scales, factor)
    scales = unpacking.powers_of_two(scales) if scales.dtype is torch.uint8 else scales.float()
    if factor is not None:
        scales = scales * factor.float().reshape(1, 1)
    unpack = partial(unpacking.fp4, packed, scales)
    table.add(f"{stem}.weight", (num_out, num_in), unpack, make_blocks=in_blocks)


def _read_modelopt(table: _Table) -> None:
    """Read NVIDIA's own format: FP8 with one scale, or 4 bits with two."""
    for stem in table.stems(".weight_scale_2"):
        factor = table.tensors.pop(f"{stem}.weight_scale_2")
        packed = table.take(f"{stem}.weight", 2, (torch.uint8,))
        scales = table.take(f"{stem}.weight_scale", 2, _FP8)
        _add_fp4(table, stem, packed, scales, factor)
    _read_scaled(table, None)


def _read_mxfp4(table: _Table) -> None:
    for name in table.stems("_blocks"):
        blocks = table.take(f"{name}_blocks", 4, (torch.uint8,))
        exponents = table.take(f"{name}_scales", 3, (torch.uint8,))
        num_experts, num_out, num_groups, num_bytes = blocks.shape
        table.check(exponents.shape == blocks.shape[:3], name)
        unpack = partial(unpacking.mxfp4_experts, blocks, exponents, table.dtype)
        table.check(2 * num_bytes == COLUMNS, name)
        in_blocks = partial(unpacking.mxfp4_blocks, blocks, exponents)
        shape = (num_experts, 2 * num_bytes * num_groups, num_out)
        table.add(name, shape, unpack, make_blocks=in_blocks)


def _read_bitsandbytes(table: _Table) -> None:
    for stem in table.stems(".SCB"):
        scales = table.take(f"{stem}.SCB", 1, _FLOATS)
        values = table.take(f"{stem}.weight", 2, (torch.int8,))
        table.check(len(scales) == len(values), stem)
        layout = table.tensors.pop(f"{stem}.weight_format", None)
        table.check(layout is None or (layout.numel() == 1 and int(layout) == 0), stem)
        scales = scales.float().unsqueeze(1) / 127
        unpack = partial(unpacking.scaled, values, scales, (1, values.shape[1]), None)
        table.add(f"{stem}.weight", tuple(values.shape), unpack)
    for kind in ("nf4", "fp4"):
        for name in table.stems(f".quant_state.bitsandbytes__{kind}"):
            _read_bitsandbytes_4(table, name, f"{name}.quant_state.bitsandbytes__{kind}")


def _read_bitsandbytes_4(table: _Table, name: str, state_name: str) -> None:
    state = _quant_state(table, state_name)
    block, shape = state["blocksize"], tuple(state["shape"])
    packed = table.tensors.pop(name, None)
    table.check(packed is not None and packed.dtype is torch.uint8, name)
    assert packed is not None
    codes = table.take(f"{name}.quant_map", 1, _FLOATS)
    scales = table.take(f"{name}.absmax", 1, (*_FLOATS, torch.uint8))
    count = prod(shape)
    table.check(packed.numel() == ceil(count / 2) and len(codes) == 16, name)
    table.check(len(scales) == ceil(count / block), name)
    if scales.dtype is torch.uint8:
        scales = _nested_scales(table, name, state, scales)
    table.add(name, shape, partial(unpacking.blockwise_lookup, packed, codes, scales, block, count))


def _quant_state(table: _Table, name: str) -> dict[str, Any]:
    """Return the settings of one weight, which are JSON in a tensor of bytes."""
    raw = table.take(name, 1, (torch.uint8,))
    try:
        state = json.loads(bytes(raw.tolist()))
        block, shape = state["blocksize"], state["shape"]
        sizes = [block, *shape, state.get("nested_blocksize", 1)]
        is_right = all(type(size) is int and 0 < size < 1 << 31 for size in sizes)
        float(state.get("nested_offset", 0.0))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise table.fault(f"{name} is not what bitsandbytes writes") from error
    table.check(is_right and len(shape) > 0, name)
    return dict(state)


def _nested_scales(
    table: _Table, name: str, state: dict[str, Any], packed: torch.Tensor
) -> torch.Tensor:
    codes = table.take(f"{name}.nested_quant_map", 1, _FLOATS)
    scales = table.take(f"{name}.nested_absmax", 1, _FLOATS)
    block = state.get("nested_blocksize", 0)
    table.check(len(codes) == 256 and block > 0, name)
    table.check(len(scales) == ceil(len(packed) / block), name)
    offset = float(state.get("nested_offset", 0.0))
    return unpacking.nested_scales(packed, codes, scales, block, offset)


def _read_mlx(table: _Table) -> None:
    for stem in table.stems(".scales"):
        words = table.take(f"{stem}.weight", 2, _WORDS)
        scales = table.take(f"{stem}.scales", 2, _FLOATS)
        offsets = table.take(f"{stem}.biases", 2, _FLOATS)
        settings = {**table.settings, **_mlx_own(table.settings, stem)}
        bits, size = settings.get("bits"), settings.get("group_size")
        if type(bits) is not int or not 2 <= bits <= 8 or type(size) is not int or size < 1:
            raise table.fault(f"config.json gives no bits and group_size of {stem}")
        num_in = scales.shape[1] * size
        table.check(words.shape[1] * _WORD_BITS == num_in * bits, stem)
        table.check(len(words) == len(scales) and scales.shape == offsets.shape, stem)
        unpack = partial(unpacking.affine, words, scales, offsets, bits, num_in)
        stored = StoredGroups(WordOrder.ROWS, bits, words, scales, offsets=offsets)
        table.add(f"{stem}.weight", (len(words), num_in), unpack, stored)


def _mlx_own(settings: Mapping[str, Any], stem: str) -> dict[str, Any]:
    """Return what the settings of one layer change.

    Its name may stand there without its prefix, or with one that its tensors lack.
    """
    own = settings.get(stem)
    if isinstance(own, dict):
        return own
    others = (
        value
        for name, value in settings.items()
        if isinstance(value, dict) and (name.endswith(f".{stem}") or stem.endswith(f".{name}"))
    )
    return next(others, {})


# Each method's name as people write it, and what reads it.
_METHODS: dict[str, tuple[str, Callable[[_Table], None]]] = {
    "gptq": ("GPTQ", _read_gptq),
    "awq": ("AWQ", _read_awq),
    "fp8": ("FP8", _read_fp8),
    "fbgemm_fp8": ("FP8", _read_fp8),
    "mxfp4": ("MXFP4", _read_mxfp4),
    "compressed-tensors": ("compressed-tensors", _read_compressed),
    "modelopt": ("ModelOpt", _read_modelopt),
    "bitsandbytes": ("bitsandbytes", _read_bitsandbytes),
    "mlx": ("MLX", _read_mlx),
}
