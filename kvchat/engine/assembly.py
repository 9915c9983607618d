"""Builds an engine from settings: model, pools sized to the budget, cache, scheduler, drafters.

A draft model's cache has room for as many tokens as the target's, from the same device budget.
Its KV is in the same store, under its own identity. If the draft model cannot be used, the target
answers without it, and a note says why.
"""

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_pool import SCRATCH_BLOCK
from kvchat.cache.disk.quota import disk_budget
from kvchat.cache.disk.weight_files import WeightFiles, weight_directory
from kvchat.cache.kv_pool import CodedFormat
from kvchat.cache.state_manager import StateCacheManager, state_blocks
from kvchat.cache.windowed_manager import WindowedCacheManager
from kvchat.cache.windowed_state_manager import WindowedStateManager
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from kvchat.core.errors import KvchatError, ModelError
from kvchat.core.events import LoadProgress, ModelReady
from kvchat.core.parameters import KV_CODES
from kvchat.core.text import Size
from kvchat.core.types import Memory
from kvchat.engine.assistant_drafter import AssistantDrafter
from kvchat.engine.draft_model import MOST_CAUGHT_UP, ModelDrafter, StatefulDrafter
from kvchat.engine.drafters import Drafter
from kvchat.engine.engine import Engine
from kvchat.engine.head_drafter import HeadDrafter
from kvchat.engine.kv_choice import KvChoice, chosen_kv, kv_notes
from kvchat.engine.kv_mover import possible_rotations
from kvchat.engine.kv_storage import (
    device_budget,
    kv_geometry,
    kv_windows,
    largest_step,
    new_kv_pool,
    new_windowed_pool,
    pool_budget,
    require_kv_dtype,
    small_kv,
    tokens_within,
)
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.request_trace import RequestTrace
from kvchat.engine.runner import Runner
from kvchat.engine.speculation import Mode, Speculation
from kvchat.engine.stateful_runner import StatefulRunner
from kvchat.engine.step_threads import StepThreads
from kvchat.engine.tiers import chosen_weights, new_chain, rate_subject
from kvchat.model.assistant import load_assistant
from kvchat.model.checkpoint.drafters import EagleForm, eagle_form, is_assistant, own_drafter
from kvchat.model.checkpoint.local_models import stored_format
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.text_files import same_vocabulary
from kvchat.model.device import can_change_threads, dtype_name
from kvchat.model.eagle_head import EagleModel, load_eagle
from kvchat.model.gpu.cuda_graph import CudaGraphs
from kvchat.model.gpu.graphs import GraphRunner
from kvchat.model.loader import LoadedModel, Progress, load_model
from kvchat.model.next_head import HeadModel, load_head
from kvchat.model.packed.quantise import num_packed_bytes
from kvchat.model.paged_model import PagedModel, StatefulModel
from kvchat.model.self_test import ensure_faster_reads, ensure_trusted
from kvchat.model.spec import ModelSpec, slow_attention
from kvchat.model.state import state_bytes
from kvchat_kernels.cpu.step import FEW_ROWS

_log = logging.getLogger(__name__)

# Prefill work per step on a CPU, in multiply-adds: about a tenth of a second on two fast cores.
# Beside it answers wait for their next token. It is fixed, not measured: the same
# settings must cut a prompt into the same chunks, or low-precision rounding would vary by run.
_CPU_STEP_MACS = 4e10
_CPU_STEP_TOKENS = (16, 512)
# Requests that run at once. On a CPU as many as the rows that a compiled step takes.
_MOST_RUNNING = {"cpu": 64, "cuda": 256}
# A prefill step on a GPU takes about this long at the measured rate, because a stop waits for the
# end of a step. Sizes are powers of two, so that a small change of the rate changes no size.
_CUDA_STEP_S = 0.1
_CUDA_STEP_TOKENS = (256, 4096)
_CUDA_UNMEASURED_TOKENS = 1024
# Larger steps pay no more: 0.4b shape, bfloat16, 1,024 tokens, AMD Zen 3, two cores: 160 tokens/s
# in steps of 64, 175 in steps of 256, 155 at once.
_MOST_PREFILL_TOKENS = 256
# Of such a step in one layer, multiply-adds of products, and of attention. Esc ends it before any
# product: of a layer's seven the largest is a third. Two slow cores (AMD Zen 1) take 0.1 s for it.
_CPU_LAYER_MACS = 1e10
_CPU_ATTENTION_MACS = 2e9


@dataclass(frozen=True, slots=True)
class AssembledEngine:
    """An engine ready to run, its loaded model, and the event that reports it ready."""

    engine: Engine
    loaded: LoadedModel
    ready: ModelReady


def load_trusted(
    source: ModelSource,
    config: ModelConfig,
    max_context: int | None,
    memory: Memory,
    progress: Progress,
    cache_config: CacheConfig | None = None,
) -> LoadedModel:
    """Load a model and check its paged forward pass over plain KV.

    Before the weights are read it is checked that the model can have KV as of `cache_config`.
    Raises the errors of `build_engine`.
    """
    cache = cache_config or CacheConfig()

    def check(spec: ModelSpec, device: torch.device) -> None:
        require_kv_dtype(source.name, spec, cache)

    store = _weight_files(cache)
    loaded = load_model(source, config, max_context, progress, memory, check, store)
    progress(LoadProgress("checking the paged forward pass"))
    ensure_trusted(loaded, memory)
    return loaded


def _with_trusted_kv(loaded: LoadedModel, choice: KvChoice, memory: Memory) -> LoadedModel:
    """Return a loaded model that is checked over its KV, with notes on that."""
    geometry = kv_geometry(loaded.spec, choice.config, loaded.dtype)
    if isinstance(geometry.format, CodedFormat):
        new_kv = partial(small_kv, geometry, loaded.device)
        ensure_faster_reads(loaded, geometry.format.name, new_kv, memory)
        slow = slow_attention(loaded.spec, loaded.device, geometry.dtype, code=geometry.format.code)
        notes = (*loaded.notes, *slow, *kv_notes(loaded, geometry, memory, choice.reason))
        loaded = replace(loaded, notes=tuple(dict.fromkeys(notes)))
    return loaded


def _weight_files(config: CacheConfig) -> WeightFiles | None:
    """Return the store of packed weights beside the KV; None if nothing is kept on the disk."""
    if config.directory is None:
        return None
    limit = disk_budget(config.disk_bytes, config.directory)
    return WeightFiles(weight_directory(config.directory), limit)


def engine_around(
    loaded: LoadedModel,
    cache_config: CacheConfig,
    engine_config: EngineConfig,
    memory: Memory,
    speculation: Speculation | None = None,
    reads_before: tuple[int, ...] | None = None,
) -> Engine:
    """Build pools, cache and engine for a loaded model; a model serves one engine at a time.

    `reads_before`: a drafter goes on from hidden states, `()` the last ones or those before these
    layers, which steps keep then, while drafts are on.
    Raises ModelError if the model's KV cannot have the configured dtype, or there is no room.
    """
    require_kv_dtype(loaded.source.name, loaded.spec, cache_config)
    short = step_tokens(loaded.spec, loaded.device)
    most = engine_config.max_step_tokens or most_step_tokens(loaded, short, cache_config)
    cache, runner = _cache_and_runner(loaded, cache_config, engine_config, most)
    chain = new_chain(loaded, cache, cache_config, memory)
    rate = chain.planner.prefill
    short = min(most, step_tokens(loaded.spec, loaded.device, rate.tokens_per_s))
    engine = Engine(
        runner=runner,
        cache=cache,
        max_context=loaded.max_context,
        max_step_tokens=engine_config.max_step_tokens or short,
        max_running=engine_config.max_running or _MOST_RUNNING[loaded.device.type],
        vocab_size=loaded.spec.vocab_size,
        chain=chain,
        speculation=speculation,
        max_prefill_tokens=engine_config.max_step_tokens or prefill_tokens(loaded, short),
        max_pairs=prefill_pairs(loaded.spec, loaded.device),
        key_rotations=partial(possible_rotations, loaded),
        trace=new_trace(loaded, engine_config, memory),
    )
    if reads_before is not None:
        runner.keep_hidden(reads_before, lambda: engine.speculation.is_on)
    return engine


def new_trace(loaded: LoadedModel, config: EngineConfig, memory: Memory) -> RequestTrace | None:
    """Return what notes the requests to a model; None where nothing does."""
    if config.trace is None:
        return None
    return RequestTrace(config.trace, rate_subject(loaded).encode(), memory)


def _cache_and_runner(
    loaded: LoadedModel, config: CacheConfig, engine_config: EngineConfig, max_step_tokens: int
) -> tuple[CacheManager, Runner]:
    """Return the cache of a model that computes at most so many tokens of a sequence in a step."""
    threads = new_threads(loaded.device)
    geometry = kv_geometry(loaded.spec, config, loaded.dtype)
    windows = kv_windows(loaded.spec, config)
    num_bytes = state_bytes(loaded.spec.state, loaded.dtype)
    if windows is not None:
        windows = replace(windows, num_state_blocks=state_blocks(geometry, num_bytes))
        pool = new_windowed_pool(loaded, geometry, windows, config, max_step_tokens)
        numbers = pool.blocks.of_block
        if loaded.spec.state:
            both = WindowedStateManager(pool, num_bytes, max_step_tokens, config.reuse)
            stateful = StatefulModel(loaded, pool.layers, windows.layers, numbers)
            return both, StatefulRunner(stateful, both, threads)
        manager = WindowedCacheManager(pool, max_step_tokens, config.reuse)
        model = PagedModel(loaded, pool.layers, windows.layers)
        graphs = new_graphs(model, manager, engine_config, numbers)
        return manager, Runner(model, manager.block_size, graphs, threads, numbers)
    kv_pool = new_kv_pool(loaded, geometry, config)
    if loaded.spec.state:
        states = StateCacheManager(kv_pool, num_bytes, config.reuse)
        return states, StatefulRunner(StatefulModel(loaded, kv_pool.layers), states, threads)
    cache = CacheManager(kv_pool, config.reuse)
    model = PagedModel(loaded, kv_pool.layers)
    graphs = new_graphs(model, cache, engine_config)
    return cache, Runner(model, cache.block_size, graphs, threads)


def step_tokens(spec: ModelSpec, device: torch.device, rate: float | None = None) -> int:
    """Return the token budget of one step, so that a stop takes about a tenth of a second.

    `rate` is the measured number of prefilled tokens a second, for a GPU; None if there is none.
    """
    if device.type != "cpu":
        fewest, most = _CUDA_STEP_TOKENS
        tokens = int(rate * _CUDA_STEP_S) if rate is not None else _CUDA_UNMEASURED_TOKENS
        return min(most, max(fewest, 1 << max(0, tokens.bit_length() - 1)))
    low, high = _CPU_STEP_TOKENS
    affordable = int(_CPU_STEP_MACS / max(1, spec.num_parameters))
    return min(high, max(low, 1 << max(0, affordable.bit_length() - 1)))


def most_step_tokens(loaded: LoadedModel, short: int, config: CacheConfig) -> int:
    """Return the most tokens of a step, at any measured rate; `short` as of `prefill_tokens`."""
    spec, device = loaded.spec, loaded.device
    if device.type == "cpu":
        return prefill_tokens(loaded, short)
    geometry = kv_geometry(spec, config, loaded.dtype)
    budget = device_budget(config, device)
    return min(
        _CUDA_STEP_TOKENS[1], largest_step(geometry, kv_windows(spec, config), budget, device)
    )


def prefill_tokens(loaded: LoadedModel, short: int) -> int:
    """Return the token budget of a step that only prefills, and can be abandoned at every product.

    `short` is that of other steps. A GPU's layers are queued at once, so there all steps are alike.
    """
    spec = loaded.spec
    if not spec.layers or loaded.device.type != "cpu":
        return short
    affordable = int(_CPU_LAYER_MACS * len(spec.layers) / max(1, spec.num_parameters))
    return max(short, min(_MOST_PREFILL_TOKENS, 1 << max(0, affordable.bit_length() - 1)))


def prefill_pairs(spec: ModelSpec, device: torch.device) -> int:
    """Return how many tokens times context a step of prefill may have; 0 for any number.

    So attention, which nothing ends, takes no longer at the end of a long context.
    """
    whole = [x for x in spec.layers if x.span.window is None and x.span.chunk is None]
    if not whole or device.type != "cpu":
        return 0
    return int(_CPU_ATTENTION_MACS) // max(x.num_heads * (x.key_dim + x.value_dim) for x in whole)


def new_graphs(
    model: PagedModel,
    cache: CacheManager,
    config: EngineConfig,
    window_blocks: torch.Tensor | None = None,
) -> GraphRunner | None:
    """Return the graph runner for small steps; None off CUDA, if turned off, or without memory."""
    if model.device.type != "cuda" or not config.graphs or model.loaded.spec.gathered is not None:
        return None  # a gathered step copies contexts, whose lengths differ from step to step
    max_context = min(model.loaded.max_context, cache.max_tokens)
    try:
        capturing = CudaGraphs(model.device)
        return GraphRunner(
            model,
            cache.block_size,
            max_context,
            SCRATCH_BLOCK,
            capturing,
            window_blocks=window_blocks,
        )
    except RuntimeError as error:  # such as too little memory: steps run eagerly
        _log.warning("graphs are not available", exc_info=error)
        return None


def new_threads(device: torch.device) -> StepThreads | None:
    """Return the chooser of the number of threads of small steps.

    Returns None on a GPU, and where that number cannot change after the first step.
    """
    if device.type != "cpu" or not can_change_threads():
        return None
    return StepThreads(torch.get_num_threads())


def model_ready(loaded: LoadedModel, engine: Engine, began_s: float) -> ModelReady:
    """Return the event that reports the engine ready; loading began at `began_s`."""
    return ModelReady(
        name=loaded.source.name,
        identity=loaded.identity,
        device=str(loaded.device),
        dtype=dtype_name(loaded.dtype),
        context_limit=engine.max_context,
        load_s=time.perf_counter() - began_s,
        notes=loaded.notes,
        kv_dtype=engine.cache.kv_pool.geometry.dtype_beside(loaded.dtype),
        weights=chosen_weights(loaded),
        stored_as=stored_format(loaded.source),
    )


# Bytes of weights that a CPU cache holds.
_HELD_BY_A_CACHE = 4 << 20


def build_engine(
    source: ModelSource,
    model_config: ModelConfig,
    cache_config: CacheConfig,
    engine_config: EngineConfig,
    memory: Memory,
    progress: Progress,
    speculation_config: SpeculationConfig | None = None,
    draft_source: ModelSource | None = None,
) -> AssembledEngine:
    """Load a model and, if given, a draft model, and build the engine for them.

    `memory` keeps what is found out about the model and the machine between runs. If the draft
    model, or any draft, cannot be used, the model's notes say why. Raises ModelError or
    ModelUnsupported with a message for the user.
    """
    began_s, most = time.perf_counter(), engine_config.max_context
    mode = Mode((speculation_config or SpeculationConfig()).mode)
    plain = load_trusted(source, model_config, most, memory, progress, cache_config)
    choice = chosen_kv(plain, cache_config, most, memory)
    target, cache_config = _with_trusted_kv(plain, choice, memory), choice.config
    build = _DraftBuild(target, model_config, cache_config, engine_config, memory)
    draft: _Draft | None = None
    try:
        if draft_source is not None:
            draft = build.drafter(draft_source)
        elif mode is Mode.AUTO:
            draft_source = build.own_source()
            draft = build.drafter(draft_source) if draft_source is not None else build.head()
    except Exception as error:  # without a draft model, the target can still answer
        of_what = "the draft model" if draft_source is not None else "its head for the next token"
        target = _without_drafts(target, of_what, error)
    drafters: list[Drafter] = [NgramDrafter(), *([draft.drafter] if draft is not None else [])]
    speculation = Speculation(drafters, mode)
    target_cache = draft.target_cache if draft is not None else cache_config
    reads_before = draft.reads_before if draft is not None else None
    engine = engine_around(target, target_cache, engine_config, memory, speculation, reads_before)
    if draft is not None and isinstance(draft.drafter, AssistantDrafter):
        try:
            draft.drafter.read_from(engine.cache)
        except Exception as error:  # without drafts, the target can still answer
            speculation.drop(draft.drafter, error)
            draft, target = None, _without_drafts(target, "the draft model", error)
    ready = model_ready(target, engine, began_s)
    if draft is not None and draft_source is not None:
        ready = replace(ready, draft=draft_source.name, notes=(*ready.notes, *draft_source.notes))
    return AssembledEngine(engine, target, ready)


def _without_drafts(target: LoadedModel, of_what: str, error: Exception) -> LoadedModel:
    """Return a model with a note on what it has no drafts of."""
    _log.warning("no draft model", exc_info=error)
    note = f"Answers come without {of_what}: {_sentence(error)}"
    return replace(target, notes=(*target.notes, note))


@dataclass(frozen=True, slots=True)
class _Draft:
    """A drafter, the cache settings with the budget left for the target, and what `engine_around`
    is told that it reads.
    """

    drafter: Drafter
    target_cache: CacheConfig
    reads_before: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _DraftBuild:
    """The settings from which a draft model for `target` is built."""

    target: LoadedModel
    model_config: ModelConfig
    cache_config: CacheConfig
    engine_config: EngineConfig
    memory: Memory

    def drafter(self, source: ModelSource) -> _Draft:
        """Load a draft model and give it its share of the budget; raises if that fails."""
        target = self.target
        form = eagle_form(source)
        if form is not None or is_assistant(source):
            return self._reader(source, form)
        if not same_vocabulary(target.source, source):
            raise ModelError(f"{source.name} has another vocabulary than {target.source.name}.")
        config = replace(self.model_config, device=target.device.type)
        loaded = load_trusted(source, config, target.max_context, self.memory, lambda event: None)
        own_config, target_config = self._shared_budget(loaded, self._own_cache_config())
        cache, runner = _cache_and_runner(loaded, own_config, self.engine_config, MOST_CAUGHT_UP)
        drafter = (StatefulDrafter if loaded.spec.state else ModelDrafter)(
            runner,
            cache,
            loaded.spec.vocab_size,
            loaded.max_context,
            new_chain(loaded, cache, own_config, self.memory, is_draft=True),
            piece_rows=_piece_rows(loaded),
        )
        return _Draft(drafter, target_config)

    def own_source(self) -> ModelSource | None:
        """Return the drafter that the model has on this machine, None where it cannot draft."""
        return own_drafter(self.target.source) if self._where_none() is None else None

    def head(self) -> _Draft | None:
        """Return the checkpoint's head for the next token as a drafter; None if there is none."""
        target = self.target
        in_graphs = target.device.type != "cpu" and not target.spec.state
        if target.spec.gathered is not None or in_graphs:
            return None  # a step in a graph leaves no hidden states
        loaded = load_head(target)
        if loaded is None:
            return None
        cache, target_config = self._cache_of_head(loaded)
        model = HeadModel(loaded, cache.kv_pool.layers)
        threads = new_threads(loaded.device)
        return _Draft(HeadDrafter(model, cache, loaded.max_context, threads), target_config, ())

    def _reader(self, source: ModelSource, form: EagleForm | None) -> _Draft:
        """Load an EAGLE-3 head, or without its form a drafter of Gemma 4, as `drafter`."""
        target = self.target
        if (where := self._where_none()) is not None:
            raise ModelError(f"A model {where} shows {source.name} no hidden states.")
        if form is None:
            drafter = AssistantDrafter(load_assistant(target, source))
            return _Draft(drafter, self.cache_config, ())
        loaded, before = load_eagle(target, source, form)
        cache, target_config = self._cache_of_head(loaded)
        model = EagleModel(loaded, cache.kv_pool.layers)
        threads = new_threads(loaded.device)
        head = HeadDrafter(model, cache, loaded.max_context, threads, "draft")
        return _Draft(head, target_config, before)

    def _where_none(self) -> str | None:
        """Return where the model runs if it shows no hidden states there."""
        if self.target.device.type != "cpu":
            return "on a GPU"
        return "on the gathered path" if self.target.spec.gathered is not None else None

    def _cache_of_head(self, loaded: LoadedModel) -> tuple[CacheManager, CacheConfig]:
        """Return a head's cache in memory, and the settings left for the target.

        It keeps all of a window: contexts whose beginning a head does not know are not committed.
        """
        whole = replace(self._own_cache_config(), whole_windows=True)
        config, target_config = self._shared_budget(loaded, whole)
        kv_pool = new_kv_pool(loaded, kv_geometry(loaded.spec, config, loaded.dtype), config)
        return CacheManager(kv_pool, config.reuse), target_config

    def _shared_budget(
        self, loaded: LoadedModel, config: CacheConfig
    ) -> tuple[CacheConfig, CacheConfig]:
        """Return the cache settings of a drafting model, and those left for the target: both have
        room for as many tokens. `config` are its settings with the budget of both.
        """
        target, device = self.target, self.target.device
        budget = device_budget(config, device)
        unit = kv_geometry(loaded.spec, config, loaded.dtype).block_bytes

        def tokens(of: LoadedModel, settings: CacheConfig, num_bytes: int) -> int:
            geometry = kv_geometry(of.spec, settings, of.dtype)
            windows = kv_windows(of.spec, settings)
            if windows is not None and len(windows.layers) == len(geometry.layers):
                return num_bytes // geometry.token_bytes  # blocks alone take no bytes
            of_pools = pool_budget(of.spec, of.dtype, num_bytes)
            return tokens_within(of.spec, geometry, settings, device, of_pools)

        def has_more(num_units: int) -> bool:
            """Whether it has room for more tokens than the target with bytes of so many blocks."""
            of_target = tokens(target, self.cache_config, budget - num_units * unit)
            return tokens(loaded, config, num_units * unit) > of_target

        num_units = max(0, bisect_left(range(budget // unit + 1), True, key=has_more) - 1)
        own = Size(num_bytes=num_units * unit)
        left = Size(num_bytes=budget - num_units * unit)
        return replace(config, device_bytes=own), replace(self.cache_config, device_bytes=left)

    def _own_cache_config(self) -> CacheConfig:
        """Return the draft model's settings: its KV is never rounded.

        It is small, and drafts from rounded KV are accepted less often (llama.cpp#25725).
        """
        is_rounded = self.cache_config.kv_dtype in KV_CODES
        return replace(self.cache_config, kv_dtype="auto") if is_rounded else self.cache_config


def _piece_rows(loaded: LoadedModel) -> int | None:
    """Return the most rows of a compiled step if several are faster than one large step, else None.

    A large step uses transformers' own forward pass, and reads the weights once. The weights of a
    tiny model stay in the CPU cache, so reading them again costs almost nothing.
    """
    module, compiled = loaded.module, loaded.compiled
    num_bytes = sum(p.nbytes for p in module.parameters()) + num_packed_bytes(module)
    is_compiled = compiled is not None and not compiled.is_off
    return FEW_ROWS if is_compiled and num_bytes <= _HELD_BY_A_CACHE else None


def _sentence(error: Exception) -> str:
    if isinstance(error, KvchatError):
        return error.message
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "there is no memory for it."
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}."
