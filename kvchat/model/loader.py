"""Loads a checkpoint directory into a module on its device, ready to be bound to KV pools.

Reads safetensors and GGUF only and runs no remote code. Maps the weights instead of copying them
where dtype and device allow.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.utils import logging as transformers_logging

from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.core.events import LoadProgress
from kvchat.core.types import NO_MEMORY, Memory
from kvchat.model.checkpoint.drafters import refuse_drafter
from kvchat.model.checkpoint.identity import sample_digest
from kvchat.model.checkpoint.lora import merge
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.tensors import (
    CheckpointTensors,
    Names,
    leftovers,
    memory_of_gguf,
    read_tensors,
    refuse_gaps,
)
from kvchat.model.cpu.compiled_step import CompiledModel, compiled_model
from kvchat.model.decoder.matrices import keep_precise
from kvchat.model.device import choose_device, dtype_name, dtype_of, limit_kept_shapes, set_threads
from kvchat.model.files.checkpoint_files import read_json
from kvchat.model.gguf.file import weight_header
from kvchat.model.gpu.fuse import Fusing
from kvchat.model.gpu.memory import NoRoom, runs_fused, weights_on_gpu
from kvchat.model.hf.config_limits import ParameterLimit, check_counts, parameter_limit
from kvchat.model.hf.known_specs import KnownSpecs, spec_key
from kvchat.model.hf.model_class import (
    MetaModel,
    class_and_config,
    operators_on_meta,
    reads_more_than_text,
    tensor_names,
    without_towers,
)
from kvchat.model.hf.module_adapter import (
    OWN_ATTENTION,
    PAGED,
    StepContext,
    freeze_rope,
    register_attention,
)
from kvchat.model.hf.probe import (
    ProbeInconclusive,
    attention_to_probe_loaded,
    probe_loaded,
    probe_meta,
    register_probe,
)
from kvchat.model.hf.weight_reads import divide_weights
from kvchat.model.packed.formats import packing_of
from kvchat.model.packed.matrices import NOWHERE, Keeping, WeightStore
from kvchat.model.packed.quantise import (
    is_packed,
    quantise,
    round_activations,
    use_blocks,
    use_cpu_products,
)
from kvchat.model.rounding import Effect, effect_on
from kvchat.model.spec import ModelSpec, slow_attention

Progress = Callable[[LoadProgress], None]
# Raises ModelError for a model that cannot be used as it is wanted, on the device.
Check = Callable[[ModelSpec, torch.device], None]

_log = logging.getLogger(__name__)

# Load one model at a time: transformers changes torch's process-wide default dtype meanwhile.
LOADING = threading.Lock()
# The form of weights that stay in a file's blocks; part of the identity of KV.
IN_BLOCKS = "blocks"
# The form of weights as the checkpoint has them.
OWN = "own"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A module with its weights on its device, and the facts about it.

    `max_context` is the longest sequence in tokens. Length-dependent position encodings are fixed
    to it, so it is part of the KV's identity. `identity` is the files' `sample_digest`. `marks`
    are the files' marks at loading, see `ModelSource.marks`. `notes` are warnings about the files
    for the user. `weights` is the format of the weights that results depend on: `own`, `blocks` of
    a file, `int8` or `int4`; `asked_weights` is the setting; `in_8` are the kinds of matrices that
    have 8 bits where others have 4. `step` holds the running step for the
    module's code. `fusing` replaces modules' code during a step, on a GPU; `compiled` runs small
    steps on a CPU. `load_s` is in seconds.
    """

    source: ModelSource
    module: Any
    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    max_context: int
    identity: str
    load_s: float
    marks: Mapping[Path, str] = field(default_factory=dict)
    frozen_rope: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    step: StepContext = field(default_factory=StepContext)
    fusing: Fusing | None = None
    compiled: CompiledModel | None = None
    weights: str = OWN
    asked_weights: str = "auto"
    in_8: tuple[str, ...] = ()

    @property
    def has_choice_of_weights(self) -> bool:
        """Whether the model can have weights in fewer bits than its checkpoint."""
        return can_pack(self.spec, self.device)


def read_config(source: ModelSource) -> Any:
    """Return a checkpoint's transformers config.

    Raises ModelError if config.json is unreadable, ModelUnsupported if transformers rejects it.
    """
    # kvchat reports progress and warnings itself.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    content = _config_content(source)
    refuse_drafter(source)
    check_counts(content)
    packing_of(content, source.name)
    if "configuration_files" in content:
        raise ModelUnsupported(
            f"config.json of {source.name} is not its only one: it names others by version.",
            "Rename the newest to config.json.",
        )
    names = content.get("architectures")
    are_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    has_odd_names = "model_type" in content and not (are_names or names is None)
    if has_odd_names:  # transformers needs none, and some versions of it refuse others than names
        del content["architectures"]
    try:
        if source.gguf is not None or has_odd_names:
            config = AutoConfig.for_model(**content)
        else:
            config = AutoConfig.from_pretrained(
                source.directory, trust_remote_code=False, local_files_only=True
            )
    except Exception as error:  # each configuration class raises its own error types
        raise ModelUnsupported(
            f"transformers cannot use the configuration of {source.name}: {_first_line(error)}",
            "Models that bring their own code are not run.",
        ) from error
    # kvchat unpacks weights itself; transformers would ask for the packages of their format.
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return config


def _config_content(source: ModelSource) -> dict[str, Any]:
    if source.gguf is None:
        return read_json(source.config_file) or {}
    from kvchat.model.gguf.config import gguf_config
    from kvchat.model.gguf.tensors import natural_dtype

    dtype = dtype_name(natural_dtype(source.gguf))
    return {**gguf_config(source.gguf, source.name), "dtype": dtype}


def inspect_model(source: ModelSource, memory: Memory = NO_MEMORY) -> tuple[Any, ModelSpec | None]:
    """Return a checkpoint's config and its spec; None as the spec if the probe needs weights.

    The config is that of the text model, with as little else as its class can be built with.
    `memory` keeps what the probe finds.
    """
    model, spec = _inspect(source, memory)
    return model.config, spec


def memory_of_weights(
    source: ModelSource, config: Any, spec: ModelSpec, device: torch.device
) -> int:
    """Return the bytes of memory that the weights of a GGUF file will take on `device`."""
    blocks_on = device if can_pack(spec, device) else None
    return memory_of_gguf(source, MetaModel(config), blocks_on, spec.read_elsewhere)


def _inspect(source: ModelSource, memory: Memory) -> tuple[MetaModel, ModelSpec | None]:
    model = MetaModel(without_towers(read_config(source)))
    headers = [weight_header(path, source.gguf) for path in source.weight_files]
    content = _config_content(source)
    if source.gguf is not None:  # a byte of its blocks may hold several weights
        content["quantization_config"] = "gguf"
    try:
        return model, _probed(model, parameter_limit(headers, content), memory)
    except ProbeInconclusive:
        return model, None


def _probed(model: MetaModel, limit: ParameterLimit, memory: Memory) -> ModelSpec:
    """Return the result of an earlier probe, or probe; raises what `probe` raises."""
    known = KnownSpecs(memory)
    try:
        key = spec_key(model.config, limit)
    except (KeyError, OSError):
        return probe_meta(model, limit)
    spec = known.find(key)
    if spec is None:
        spec = probe_meta(model, limit)
        known.note(key, spec)
    return spec


def load_model(
    source: ModelSource,
    config: ModelConfig,
    max_context: int | None,
    progress: Progress,
    memory: Memory = NO_MEMORY,
    check: Check | None = None,
    store: WeightStore | None = None,
) -> LoadedModel:
    """Load a checkpoint. `max_context` (tokens) can only lower the model's own limit.

    `memory` keeps what is found out about the model. `check` is called as soon as the
    model's spec is known: before any weight is read, unless the probe needs weights. `store` keeps
    what is rounded to 8 or 4 bits for a CPU.

    Where the device is not given and the weights do not fit on the GPU, the model is loaded on the
    CPU, and a note says so. With `weights` auto a GPU gets the most bits that fit. Raises
    ModelUnsupported if the architecture cannot be paged, before any weight is read, and ModelError
    if files are missing or damaged, or memory is too small.
    """
    try:
        return _load(source, config, max_context, progress, memory, check, store)
    except NoRoom as error:
        if config.device != "auto":
            raise
        note = f"{error.message} The model runs on the CPU."
    except torch.OutOfMemoryError as error:  # another process took some meanwhile
        message = f"The GPU's memory ran out while {source.name} was loaded."
        if config.device != "auto":
            raise ModelError(message, "Use a smaller model or --device cpu.") from error
        note = f"{message} The model runs on the CPU."
    # Here the error is gone, and with it what it held of the weights on the GPU.
    on_cpu = replace(config, device="cpu")
    loaded = _load(source, on_cpu, max_context, progress, memory, check, store)
    return replace(loaded, notes=(*loaded.notes, note))


def _load(
    source: ModelSource,
    config: ModelConfig,
    max_context: int | None,
    progress: Progress,
    memory: Memory,
    check: Check | None,
    store: WeightStore | None,
) -> LoadedModel:
    start_s = time.perf_counter()
    progress(LoadProgress("reading the model's configuration"))
    set_threads(config)
    limit_kept_shapes()
    device = choose_device(config)
    module, spec, marks, read_notes = _read(source, config, device, progress, memory, check)
    if source.adapter is not None:
        progress(LoadProgress("merging the adapter"))
        merge(module, source.adapter)
    divide_weights(module)
    limit = min(spec.max_context, max_context or spec.max_context)
    frozen_rope = freeze_rope(module, limit)
    identity = sample_digest(source)
    keeping = _keeping(source, identity, marks, store)
    known = partial(effect_on, device, module, spec, source, identity, memory)
    weights, about_weights, in_8 = _place(
        module, spec, config, device, source.name, progress, keeping, known
    )
    weights, step, fusing, compiled = ways_to_run(module, spec, device, weights)
    _require_unchanged(source, marks)
    load_s = time.perf_counter() - start_s
    path = "gathered" if spec.gathered is not None else "paged"
    facts = spec.model_type, device, path, load_s
    _log.info("loaded model=%s device=%s path=%s seconds=%.2f", *facts)
    slow = slow_attention(spec, device, module.dtype)
    return LoadedModel(
        source=source,
        module=module,
        spec=spec,
        device=device,
        dtype=module.dtype,
        max_context=limit,
        identity=identity,
        marks=marks,
        load_s=load_s,
        frozen_rope=frozen_rope,
        notes=(*source.notes, *read_notes, *about_weights, *slow),
        step=step,
        fusing=fusing,
        compiled=compiled,
        weights=weights,
        asked_weights=config.weights,
        in_8=in_8,
    )


def _read(
    source: ModelSource,
    config: ModelConfig,
    device: torch.device,
    progress: Progress,
    memory: Memory,
    check: Check | None,
) -> tuple[Any, ModelSpec, Mapping[Path, str], tuple[str, ...]]:
    """Inspect a checkpoint and read its weights; the check is made as early as it can be.

    Returns the module, its spec, and marks and notes as in LoadedModel.
    """
    with LOADING:
        marks = source.marks()
        meta, spec = _inspect(source, memory)
        if check is not None and spec is not None:
            check(spec, device)
        # Linear layers may multiply with a file's blocks where nothing else is asked for.
        is_plain = config.weights == "auto" and config.dtype == "auto" and source.adapter is None
        keeps_blocks = is_plain and spec is not None and can_pack(spec, device)
        blocks_on = device if keeps_blocks else None
        dtype = dtype_of(config.dtype)
        module, notes = _read_weights(source, meta, dtype, spec, progress, blocks_on)
        if spec is None:
            spec = probe_loaded(module)
            if check is not None:
                check(spec, device)
            if spec.gathered is None:
                module.set_attn_implementation(PAGED)
    return module, spec, marks, notes


def _keeping(
    source: ModelSource, identity: str, marks: Mapping[Path, str], store: WeightStore | None
) -> Keeping:
    """Return where rounded weights are kept: nowhere with an adapter, which is merged into them."""
    if source.adapter is not None:
        return NOWHERE
    # transformers converts weights as it loads them, not in all versions alike.
    key = "\n".join((transformers.__version__, identity, *marks.values()))
    return Keeping(store, key, partial(_require_unchanged, source, marks))


def ways_to_run(
    module: Any, spec: ModelSpec, device: torch.device, weights: str
) -> tuple[str, StepContext, Fusing | None, CompiledModel | None]:
    """Return the format of the weights as LoadedModel names it, and what runs steps of a module."""
    step = StepContext()
    if not can_pack(spec, device) or (weights == "auto" and not is_packed(module)):
        weights = OWN
    elif weights == "auto":
        weights = IN_BLOCKS
    if device.type == "cpu":
        step.ask_in(module)
        round_activations(module)
        return weights, step, None, compiled_model(module, spec) if spec.gathered is None else None
    # A head for drafts is packed where its recurrent model is not.
    fusing = Fusing(module, spec, step, is_packed(module)) if runs_fused(spec) else None
    return weights, step, fusing, None


def can_pack(spec: ModelSpec, device: torch.device) -> bool:
    """Whether layers may multiply with weights in fewer bits."""
    return device.type == "cpu" or runs_fused(spec)


def _place(
    module: Any,
    spec: ModelSpec,
    config: ModelConfig,
    device: torch.device,
    name: str,
    progress: Progress,
    keeping: Keeping,
    effect_of: Callable[[str], Effect | None],
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Pack and move a model's weights.

    Returns their format, `auto` for their own, notes, and the kinds of matrices that have 8 bits
    where others have 4.
    """
    weights = config.weights
    notes: tuple[str, ...] = ()
    in_8: tuple[str, ...] = ()
    if device.type != "cpu":
        weights, notes = weights_on_gpu(module, spec, config, device, name)
    if not can_pack(spec, device):
        notes += _own_weights_only(config)
    elif weights != "auto":
        # Before the move: what is packed goes to a GPU tensor by tensor, and packed.
        progress(LoadProgress("measuring what rounding changes"))
        effect = effect_of(weights)
        if effect is not None:
            notes, in_8 = (*notes, effect.sentence(weights)), effect.in_8

        def tick(share: float) -> None:
            progress(LoadProgress("packing weights", share))

        notes += quantise(module, spec, weights, device, tick, keeping, in_8)
    move_weights(module, device, progress)
    if weights == "auto":
        use_cpu_products(module)  # the module knows its device now
    return weights, notes, in_8


def _require_unchanged(source: ModelSource, marks: Mapping[Path, str]) -> None:
    """Raise ModelError if a file of the model is another than when `marks` were taken."""
    if source.marks() != marks:
        raise ModelError(
            f"The files of {source.name} changed while they were loaded.",
            "Start again when they are complete.",
        )


def _own_weights_only(config: ModelConfig) -> tuple[str, ...]:
    """Return a note if weights in fewer bits were asked for and are not used."""
    if config.weights == "auto":
        return ()
    return (
        f"--weights {config.weights} is not used: on a GPU only models whose layers are all paged "
        "attention have weights in fewer bits.",
    )


def _read_weights(
    source: ModelSource,
    meta: MetaModel,
    dtype: torch.dtype | None,
    spec: ModelSpec | None,
    progress: Progress,
    blocks_on: torch.device | None,
) -> tuple[Any, tuple[str, ...]]:
    """Read the weights into a module on the CPU; `spec` is None if the module is to be probed.

    Weights that stay in a file's blocks go to the device `blocks_on`; None unpacks all.
    """
    register_attention()
    register_probe()
    attention = attention_name(meta.config, spec)
    kept = spec.read_elsewhere if spec is not None else ()
    module, report, found = built_module(source, meta, dtype, attention, progress, blocks_on, kept)
    refuse_gaps(source, report)
    keep_precise(module, found.precise)
    if blocks_on is not None:
        use_blocks(module, found.blocks, blocks_on, found.orders)
    return module.eval().requires_grad_(False), leftovers(
        source, _unexpected(source, meta.config, report)
    )


def read_plain_module(source: ModelSource, dtype: torch.dtype, attention: str) -> Any:
    """Return transformers' own module in `dtype` on the CPU, all weights unpacked, to compare with.

    `attention` is a name of transformers, such as `sdpa`. Raises what `load_model` raises.
    """
    meta = MetaModel(without_towers(read_config(source)))
    module, report, _ = built_module(source, meta, dtype, attention, lambda event: None, None)
    refuse_gaps(source, report)
    return module.eval().requires_grad_(False)


def built_module(
    source: ModelSource,
    meta: MetaModel,
    dtype: torch.dtype | None,
    attention: str,
    progress: Progress,
    blocks_on: torch.device | None,
    read_elsewhere: Collection[str] = (),
    names_in: Names | None = None,
) -> tuple[Any, dict[str, Any], CheckpointTensors]:
    """Return the module with its weights, transformers' report, and the tensors that were read."""
    try:
        # With tensors and no directory, transformers opens no files: no pickles that an index
        # names, no adapters and no other checkpoints beside the weights.
        found = read_tensors(source, meta, dtype, progress, blocks_on, read_elsewhere, names_in)
        model_class, class_config = class_and_config(meta.config)
        with operators_on_meta():  # where transformers builds it first
            module, report = model_class.from_pretrained(
                None,
                config=class_config,
                state_dict=found.tensors,
                dtype=found.dtype if found.dtype is not None else "auto",
                attn_implementation=attention,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except ImportError as error:
        raise ModelUnsupported(
            f"{source.name} needs a package that is not installed: {_first_line(error)}",
            "Use another checkpoint of this model.",
        ) from error
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or os.strerror(errno.ENOMEM) in str(error):
            raise ModelError(f"{source.name} does not fit in memory.") from error
        # safetensors, transformers and torch each raise their own errors for a damaged file.
        raise ModelError(
            f"The weights of {source.name} cannot be read: {_first_line(error)}",
            "Is the download complete?",
        ) from error
    return module, report, found


def attention_name(hf_config: Any, spec: ModelSpec | None) -> str:
    """Return the attention to load with; a class without the interface accepts `eager` only."""
    if spec is not None:
        is_own = OWN_ATTENTION.get(hf_config.model_type) is not None
        return "eager" if is_own or spec.gathered is not None else PAGED
    return attention_to_probe_loaded(hf_config)


def _unexpected(source: ModelSource, hf_config: Any, report: dict[str, Any]) -> set[str]:
    """Return the tensors that the model does not use, but those of towers, which are left out."""
    unexpected = set(report["unexpected_keys"])
    reads_more = bool(unexpected) and reads_more_than_text(hf_config)
    return unexpected - tensor_names(read_config(source)) if reads_more else unexpected


def move_weights(module: Any, device: torch.device, progress: Progress) -> None:
    """Move the weights one tensor at a time, to report progress. Tied weights stay tied."""
    if device.type != "cpu":
        tensors = [*module.parameters(), *module.buffers()]
        total, done = sum(tensor.nbytes for tensor in tensors), 0
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
            done += tensor.nbytes
            progress(LoadProgress("loading weights", done / total))
    progress(LoadProgress("loading weights", 1.0))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{line[:200].rstrip('.')}."
