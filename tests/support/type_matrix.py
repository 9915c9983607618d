"""One model type through the whole engine: turns, fork, edit, batch, restart and speculation.

What comes out is a verdict. The oracle is transformers' own eager forward pass over the whole
sequence, on the checkpoint as transformers loads it: no line of kvchat takes part in it.
"""

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig
from kvchat.core.errors import KvchatError
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, SamplingParams
from kvchat.engine.assembly import engine_around, load_trusted
from kvchat.engine.engine import Engine
from kvchat.engine.ngram import NgramDrafter
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Mode, Speculation
from kvchat.model import self_test
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel
from support.checkpoints import save_checkpoint
from support.every_type import every_config, every_model
from support.greedy_answer import greedy_answer
from support.said import said_by

EXACT, REFUSED, WRONG, NOT_BUILT = "exact", "refused", "wrong", "not built"
_MAX_CONTEXT = 160
_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Verdict:
    """What became of a type, and one line: the path of an exact one, else the reason."""

    outcome: str
    why: str


class Differs(Exception):
    """The engine's answer is not transformers' own."""


def verdict_of(model_type: str, directory: Path) -> Verdict:
    """Build, save, load and try a type; whatever it raises becomes its verdict."""
    try:
        reference = _saved(model_type, directory / "model")
    except Exception as error:  # each class raises its own types
        return Verdict(NOT_BUILT, _line(error))
    try:
        return _try(reference, directory)
    except KvchatError as error:
        message = error.message.replace(str(directory / "model"), "the checkpoint")
        return Verdict(REFUSED, _without_name(message))
    except Exception as error:
        return Verdict(WRONG, _line(error))


def save_type(model_type: str, directory: Path) -> PreTrainedConfig:
    """Save a tiny model of a type as a checkpoint; return its configuration."""
    config = every_config(model_type)
    made = every_model(deepcopy(config))
    save_checkpoint(directory, made)
    if type(made.config) is not type(config):  # a checkpoint of a whole, of which this is the text
        config.save_pretrained(directory)
    return config


def _saved(model_type: str, directory: Path) -> PreTrainedModel:
    """Save a model of a type as a checkpoint; return what transformers loads from it."""
    is_causal = type(save_type(model_type, directory)) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    reference: PreTrainedModel = auto.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    )
    return reference.eval()


def _try(reference: PreTrainedModel, directory: Path) -> Verdict:
    source = find_model(str(directory / "model"))
    loaded = load_trusted(
        source, ModelConfig(dtype="float32"), _MAX_CONTEXT, NO_MEMORY, lambda event: None
    )
    _check_logits(reference, loaded)
    trial = _Trial(reference, loaded, directory / "cache")
    trial.chat()
    trial.restart()
    if not loaded.spec.state:  # drafts are refused where a rejected one cannot be taken back
        trial.speculate()
    gathered = loaded.spec.gathered
    return Verdict(EXACT, f"gathered: it {gathered.reason}" if gathered is not None else "paged")


def _ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (length,), generator=generator).tolist()


def _check_logits(reference: PreTrainedModel, loaded: LoadedModel) -> None:
    one, other = (_ids(self_test.NUM_TOKENS, seed) for seed in (1, 2))
    own = _own_logits(reference, one)
    paged = self_test._paged_logits(loaded, one, other)
    error = float((paged - own).abs().max() / own.abs().max())
    if not error < _TOLERANCE:
        raise Differs(f"logits differ by {error:.1e} of the largest")


def _own_logits(reference: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


class _Trial:
    """A loaded model whose answers are held against the reference."""

    def __init__(self, reference: PreTrainedModel, loaded: LoadedModel, directory: Path) -> None:
        self._reference = reference
        self._loaded = loaded
        self._config = CacheConfig(
            directory=directory,
            block_size=8,
            device_bytes=Size(num_bytes=24 << 20),
            host_bytes=Size(num_bytes=0),
            disk_bytes=Size(num_bytes=64 << 20),
        )
        self._turns: list[list[int]] = []

    def _engine(self, speculation: Speculation | None = None) -> Engine:
        config = EngineConfig(max_step_tokens=16)
        return engine_around(self._loaded, self._config, config, NO_MEMORY, speculation)

    def chat(self) -> None:
        """Three turns, a fork of the second and an edit of the first, and a batch."""
        engine = self._engine()
        history: list[int] = []
        for turn in range(3):
            history = history + _ids(13, seed=10 + turn)
            history += self._answer(engine, history, f"turn {turn + 1}", turn > 0)
            self._turns.append(history)
        self._answer(engine, self._turns[1] + _ids(7, seed=20), "fork", True)
        self._answer(engine, self._turns[0][:10] + _ids(9, seed=21), "edit", True)
        self._batch(engine)
        engine.close()

    def _batch(self, engine: Engine) -> None:
        prompts = [_ids(length, seed=30 + length) for length in (5, 19, 33)]
        sampling = SamplingParams(temperature=0.0)
        specs = [RequestSpec(tuple(p), sampling, max_tokens=6) for p in prompts]
        for prompt, answer in zip(prompts, said_by(engine, *specs), strict=True):
            self._check(prompt, answer, "batch")

    def restart(self) -> None:
        engine = self._engine()
        self._answer(engine, self._turns[2] + _ids(5, seed=40), "restart", True)
        engine.close()

    def speculate(self) -> None:
        drafting = Speculation([NgramDrafter()], Mode.NGRAM)
        engine = self._engine(drafting)
        self._answer(engine, (_ids(6, seed=50) * 5)[:-1], "speculation", False, count=16)
        engine.close()

    def _answer(
        self, engine: Engine, prompt: list[int], where: str, is_cached: bool, count: int = 7
    ) -> list[int]:
        answer, cached = greedy_answer(engine, prompt, count)
        if is_cached and not cached.total:
            raise Differs(f"{where}: nothing of the prefix was cached")
        self._check(prompt, answer, where)
        return answer

    def _check(self, prompt: list[int], answer: list[int], where: str) -> None:
        rows = _own_logits(self._reference, prompt + answer)[len(prompt) - 1 : -1]
        if not answer or rows.argmax(dim=1).tolist() != answer:
            raise Differs(f"{where}: other tokens than a full recompute")


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:150]}" if lines else type(error).__name__


def _without_name(message: str) -> str:
    return message.partition("is not supported: ")[2] or message
