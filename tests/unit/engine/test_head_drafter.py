"""Drafts by a checkpoint's own head for the next token: what it computes, and that texts stay.

Random heads guess almost nothing right, so tests compare logits with those of a plain twin.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from kvchat.core.events import TokensGenerated
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, SamplingParams
from kvchat.engine.assembly import build_engine
from kvchat.engine.engine import Engine
from kvchat.engine.head_drafter import HeadDrafter
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import SamplingRow
from kvchat.engine.speculation import Mode
from kvchat.model.checkpoint.source import find_model
from kvchat.model.packed.experts import expert_packs_of
from kvchat.model.packed.quantise import pack_of
from support.fixed_drafts import FixedDraftPolicy
from support.matrix import spread
from support.next_heads import NextHead, write_gguf_with_head, write_with_head
from support.said import said_by
from support.stateful_models import words

NAMES = ("qwen3_5, compiled", "qwen3_next", "glm4_moe", "deepseek_v3", "mellum")
IN_GGUF = ("qwen35", "qwen3next", "glm4_moe", "deepseek_v3, yarn")
CHECKPOINTS = [*NAMES, *(f"{name}.gguf" for name in IN_GGUF)]


def open_with_head(
    directory: Path,
    num_bytes: int = 32 << 20,
    dtype: str = "float32",
    step: int = 32,
    kv_dtype: str = "auto",
) -> Engine:
    assembled = build_engine(
        find_model(str(directory)),
        ModelConfig(dtype=dtype),
        CacheConfig(device_bytes=Size(num_bytes=num_bytes), kv_dtype=kv_dtype, directory=None),
        EngineConfig(max_context=400, max_step_tokens=step),
        NO_MEMORY,
        lambda event: None,
        SpeculationConfig("auto"),
    )
    return assembled.engine


class Spy:
    """Notes the logits from which an engine's head draws, with the context of each."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], torch.Tensor]] = []
        [self.drafter] = [d for d in engine.speculation._drafters if d.name == "mtp"]
        assert isinstance(self.drafter, HeadDrafter)
        self._due: list[list[int]] = []
        self._run = self.drafter._drawn
        monkeypatch.setattr(self.drafter, "_drawn", self._drawn)
        from kvchat.engine import head_drafter

        self._sample = head_drafter.sample
        monkeypatch.setattr(head_drafter, "sample", self._noting)

    def _drawn(self, pieces, given, due, drafts):  # type: ignore[no-untyped-def]
        states = [self.drafter._states[request] for request in due]
        # Of the first guess alone all hidden states are the model's own.
        self._due = [
            list(r.ids) if not drafts[r] and not s.first else []
            for r, s in zip(due, states, strict=True)
        ]
        return self._run(pieces, given, due, drafts)

    def _noting(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        for ids, row in zip(self._due, logits, strict=True):
            self.seen += [(ids, row.clone())] if ids else []
        return self._sample(logits, rows)


def answer(engine: Engine, prompt: Sequence[int], num_tokens: int, **settings: int) -> list[int]:
    sampling = SamplingParams(temperature=0.0)
    spec = RequestSpec(tuple(prompt), sampling, max_tokens=num_tokens, **settings)
    first, *others = said_by(engine, spec)
    assert all(other == first for other in others)
    return first


@pytest.fixture(
    scope="module", params=spread(CHECKPOINTS, [NAMES[0], *NAMES[3:], "qwen3next.gguf"])
)
def checkpoint(request, tmp_path_factory) -> tuple[NextHead, Path]:
    directory = tmp_path_factory.mktemp("with head")
    name = request.param.removesuffix(".gguf")
    if name != request.param:
        return write_gguf_with_head(directory / "m.gguf", name), directory / "m.gguf"
    return write_with_head(directory, request.param), directory


def test_its_logits_are_those_of_its_layer_over_the_whole_context(checkpoint, monkeypatch):
    """Over a long prompt in parts, an answer with wrong drafts, and a turn from the cache."""
    head, directory = checkpoint
    engine = open_with_head(directory)
    engine.speculation._policy = FixedDraftPolicy(2)
    engine.speculation.switch(Mode.MTP)
    spy = Spy(engine, monkeypatch)
    first = words(75, seed=1)
    given = answer(engine, first, 20)
    turn = [*first, *given, *words(9, seed=2)]
    given = answer(engine, turn, 20)
    assert len(spy.seen) > 20
    assert len({len(ids) for ids, _ in spy.seen if len(ids) > len(turn)}) > 10
    for ids, row in spy.seen[::3]:
        torch.testing.assert_close(row, head.logits(ids)[-1], rtol=1e-3, atol=1e-3)
    drafter = spy.drafter
    drafter.cache.check([state.table for state in drafter._states.values()])
    engine.close()


def test_answers_are_those_without_drafts(checkpoint: tuple[NextHead, Path]) -> None:
    """Branches, samples and batches; its cache is small enough to evict."""
    compare_answers(open_with_head(checkpoint[1], num_bytes=3 << 20))


def test_answers_over_few_bits_are_those_without_drafts(tmp_path: Path) -> None:
    """Of the model with recurrent state; its head's KV keeps its bits."""
    write_with_head(tmp_path, "qwen3_5, compiled")
    engine = open_with_head(tmp_path, num_bytes=3 << 20, kv_dtype="int8")
    assert engine.status().kv_dtype == "int8"

    compare_answers(engine)


def compare_answers(engine: Engine) -> None:
    """Compare what a head's guesses lead to with plain decoding; close the engine."""
    engine.speculation._policy = FixedDraftPolicy(3)
    rng = random.Random(0)
    [drafter] = [d for d in engine.speculation._drafters if isinstance(d, HeadDrafter)]
    context: list[int] = []
    for turn in range(6):
        prompt = [*context[: rng.choice((len(context), 40))], *words(rng.randint(1, 60), turn)]
        engine.speculation.switch(Mode.OFF)
        plain = answer(engine, prompt, 12)
        engine.speculation.switch(Mode.MTP)
        assert answer(engine, prompt, 12, num_samples=1 + turn % 2) == plain
        drafter.cache.check([state.table for state in drafter._states.values()])
        context = [*prompt, *plain][:200]
    assert engine.speculation.status().total.num_verified > 20
    assert not engine.speculation.failures
    engine.close()


@pytest.mark.parametrize(("name", "kind"), [("qwen35", "Q4_K"), ("glm4_moe", "Q8_0")])
def test_its_matrices_stay_in_the_blocks_of_a_gguf_file(name, kind, tmp_path, monkeypatch):
    """And its steps are compiled."""
    head = write_gguf_with_head(tmp_path / "m.gguf", name, kind)
    engine = open_with_head(tmp_path / "m.gguf", dtype="auto")
    engine.speculation.switch(Mode.MTP)
    spy = Spy(engine, monkeypatch)
    answer(engine, words(40, seed=1), 12)
    engine.close()
    loaded = spy.drafter._model.loaded
    layers = [part for part in loaded.module.modules() if type(part) is nn.Linear]
    experts = [p for p in loaded.module.modules() if type(p).__name__.endswith("Experts")]
    assert len(layers) > 5
    assert None not in [*map(pack_of, layers), *map(expert_packs_of, experts)]
    assert loaded.compiled is not None
    assert not loaded.compiled.is_off
    pairs = [(row, head.logits(ids)[-1]) for ids, row in spy.seen]
    assert min(torch.cosine_similarity(*pair, dim=0) for pair in pairs) > 0.99


def test_ids_far_above_those_of_the_newest_tokens_are_not_guessed(tmp_path, monkeypatch):
    """The product with a vocabulary of 250,000 took 8 of the 11 ms of a guess for a 0.8 B model."""
    head = write_gguf_with_head(tmp_path / "m.gguf", "qwen35", vocab_size=2048)
    engine = open_with_head(tmp_path / "m.gguf")
    engine.speculation._policy = FixedDraftPolicy(2)
    engine.speculation.switch(Mode.MTP)
    spy = Spy(engine, monkeypatch)
    low, high = words(200, seed=1), [2000 - id for id in words(200, seed=1)]
    answer(engine, low, 6)
    few = spy.seen
    spy.seen = []
    answer(engine, high, 6)
    engine.close()
    assert few
    assert spy.seen
    for ids, row in few:
        torch.testing.assert_close(row[:512], head.logits(ids)[-1, :512], rtol=1e-3, atol=1e-3)
        assert row[1024:].isinf().all()
    for ids, row in spy.seen:
        torch.testing.assert_close(row, head.logits(ids)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_it_reads_long_prompts_in_one_step(kind, tmp_path, monkeypatch):
    """Compiled steps compute them in groups of rows, each with its own hidden states."""
    head = write_gguf_with_head(tmp_path / "m.gguf", "qwen35", kind)
    engine = open_with_head(tmp_path / "m.gguf", dtype="auto", step=400)
    engine.speculation._policy = FixedDraftPolicy(1)
    engine.speculation.switch(Mode.MTP)
    spy = Spy(engine, monkeypatch)
    answer(engine, words(300, seed=1), 6)
    assert not engine.speculation.failures
    engine.close()
    assert spy.seen
    for ids, row in spy.seen:
        is_computed = row.isfinite()
        pair = row[is_computed], head.logits(ids)[-1, is_computed]
        assert torch.cosine_similarity(*pair, dim=0) > 0.99


def test_a_head_whose_guesses_are_refused_computes_nothing(tmp_path: Path) -> None:
    """It goes on from the newest hidden states once guesses are wanted again."""
    write_gguf_with_head(tmp_path / "m.gguf", "qwen35")
    engine = open_with_head(tmp_path / "m.gguf")
    policy = FixedDraftPolicy(0)
    engine.speculation._policy = policy
    engine.speculation.switch(Mode.MTP)
    [drafter] = [d for d in engine.speculation._drafters if isinstance(d, HeadDrafter)]
    ran = []
    run = drafter._runner.run_pieces
    drafter._runner.run_pieces = lambda pieces: ran.append(pieces) or run(pieces)  # type: ignore
    engine.submit(RequestSpec(tuple(words(30, seed=1)), SamplingParams(temperature=0.0), 160))
    plain: list[int] = []
    num_ran = 0
    while engine.has_work:
        for event in engine.step():
            plain += event.token_ids if isinstance(event, TokensGenerated) else ()
        if len(plain) == 1:
            num_ran = len(ran)
        elif len(plain) == 100:
            assert len(ran) == num_ran
            assert all(state.num_hidden <= 64 for state in drafter._states.values())
            policy._num_tokens = 2
    assert len(ran) > num_ran
    assert engine.speculation.status().total.num_verified > 10
    engine.speculation.switch(Mode.OFF)
    assert answer(engine, words(30, seed=1), 160) == plain
    engine.close()


def test_a_checkpoint_without_a_head_has_no_such_drafts(tmp_path: Path) -> None:
    from support.checkpoints import save_checkpoint, tiny_model

    engine = open_with_head(save_checkpoint(tmp_path, tiny_model("llama")))
    assert engine.speculation.status().drafters == ("ngram",)
    engine.close()
