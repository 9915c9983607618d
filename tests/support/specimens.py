"""Specimens: one tiny checkpoint per architecture, loaded once, with what transformers generates.

The expected ids come from `generate` on the module that was saved, in float32, greedy, one prompt
at a time: no line of kvchat takes part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_pool import SCRATCH_BLOCK
from kvchat.cache.kv_pool import KvPool
from kvchat.cache.tier import Tier
from kvchat.cache.windowed_manager import WindowedCacheManager
from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.types import SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.kv_mover import possible_rotations
from kvchat.engine.kv_storage import kv_geometry, kv_windows
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import Runner
from kvchat.engine.speculation import Speculation
from kvchat.model.checkpoint.source import find_model
from kvchat.model.cpu.compiled_step import compiled_model
from kvchat.model.gpu.graphs import Capturing, GraphRunner
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.spec import LayerSpec
from support.architectures import SUPPORTED
from support.chains import new_chain
from support.checkpoints import save_checkpoint, tiny_model
from support.late_runner import LateRunner
from support.said import said_by

MAX_CONTEXT = 128
NUM_GENERATED = 20
# Lengths below, across and far beyond the windows of the configurations, none a block's multiple.
PROMPT_LENGTHS = (5, 23, 60)
CPU = torch.device("cpu")


def random_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Specimen:
    """A saved and loaded checkpoint, the module it was made of, and its prompts."""

    name: str
    reference: PreTrainedModel
    loaded: LoadedModel

    @property
    def prompts(self) -> list[list[int]]:
        return [random_ids(length, seed=length) for length in PROMPT_LENGTHS]

    @cached_property
    def expected(self) -> list[list[int]]:
        return [self.generate(prompt) for prompt in self.prompts]

    def generate(self, prompt: list[int]) -> list[int]:
        """Return transformers' own greedy completion, on the gathered path without any cache."""
        ids = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_GENERATED,
            use_cache=self.loaded.spec.gathered is None,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return ids[0, len(prompt) :].tolist()

    def with_layers(self, **changes: Any) -> LoadedModel:
        """Return the loaded model with every layer's facts changed: a wrong reading of it."""
        spec = self.loaded.spec
        layers: tuple[LayerSpec, ...] = tuple(replace(layer, **changes) for layer in spec.layers)
        wrong = replace(spec, layers=layers)
        return replace(self.loaded, spec=wrong, compiled=compiled_model(self.loaded.module, wrong))


def make_specimen(name: str, directory: Path) -> Specimen:
    model_type, settings = SUPPORTED[name]
    return specimen_of(name, tiny_model(model_type, **settings), directory)


def specimen_of(name: str, reference: PreTrainedModel, directory: Path) -> Specimen:
    """Return a model of a name as a checkpoint, loaded."""
    source = find_model(str(save_checkpoint(directory, reference)))
    loaded = load_model(source, ModelConfig(dtype="float32"), MAX_CONTEXT, lambda _: None)
    return Specimen(name, reference, loaded)


def cache_and_runner(
    loaded: LoadedModel,
    block_size: int,
    num_blocks: int,
    num_window_blocks: int = 0,
    max_step_tokens: int = 64,
    reuse: bool = True,
    capturing: Capturing | None = None,
) -> tuple[CacheManager, Runner]:
    """Return pools for a model; with `num_window_blocks`, those of layers with a window have so
    many window blocks. With `capturing` small steps run as graphs, whose tokens come late.
    """
    config = CacheConfig(block_size=block_size)
    geometry = kv_geometry(loaded.spec, config, loaded.dtype)
    if not num_window_blocks:
        whole = KvPool(geometry, num_blocks, CPU)
        runner = _runner(PagedModel(loaded, whole.layers), block_size, capturing)
        return CacheManager(whole, reuse), runner
    windows = kv_windows(loaded.spec, config)
    assert windows is not None
    pool = WindowedKvPool(geometry, windows, num_blocks, num_window_blocks, CPU)
    model = PagedModel(loaded, pool.layers, windows.layers)
    runner = _runner(model, block_size, capturing, pool.blocks.of_block)
    return WindowedCacheManager(pool, max_step_tokens, reuse), runner


def _runner(
    model: PagedModel,
    block_size: int,
    capturing: Capturing | None,
    window_blocks: torch.Tensor | None = None,
) -> Runner:
    if capturing is None:
        return Runner(model, block_size, window_blocks=window_blocks)
    places = block_size, model.loaded.max_context, SCRATCH_BLOCK
    graphs = GraphRunner(model, *places, capturing, window_blocks=window_blocks)
    return LateRunner(model, block_size, graphs, window_blocks)


def engine_on(
    loaded: LoadedModel,
    block_size: int = 8,
    max_step_tokens: int = 64,
    reuse: bool = True,
    num_blocks: int | None = None,
    num_host_blocks: int = 0,
    num_window_blocks: int = 0,
    speculation: Speculation | None = None,
    capturing: Capturing | None = None,
    open_tier: Callable[[], Tier] | None = None,
) -> Engine:
    """Return an engine on pools of its own; only the newest engine of a loaded model may run.

    With `num_window_blocks`, layers with a window keep a window; otherwise they keep everything.
    """
    count = num_blocks if num_blocks is not None else 2 + 1200 // block_size
    cache, runner = cache_and_runner(
        loaded, block_size, count, num_window_blocks, max_step_tokens, reuse, capturing
    )
    return Engine(
        runner=runner,
        cache=cache,
        max_context=loaded.max_context,
        max_step_tokens=max_step_tokens,
        max_running=8,
        vocab_size=loaded.spec.vocab_size,
        chain=new_chain(cache, open_tier, num_host_blocks),
        speculation=speculation,
        key_rotations=partial(possible_rotations, loaded),
    )


def complete(engine: Engine, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return greedy completions, run together; checks the cache after every step."""
    greedy = SamplingParams(temperature=0.0)
    specs = [RequestSpec(tuple(p), greedy, max_tokens=NUM_GENERATED) for p in prompts]
    return said_by(engine, *specs)
