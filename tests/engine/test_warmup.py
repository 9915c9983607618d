"""The warm-up: what a model has to prove is proven before a step's time is taken."""

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, Size
from kvchat.core.types import SamplingParams
from kvchat.engine.assembly import build_engine
from kvchat.engine.request import RequestSpec
from kvchat.engine.runner import Warmup
from kvchat.model.fuse import Fusing, Fusion, _Fuser
from kvchat.model.fused_layers import Angles, WholeModel
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.source import find_model
from support.checkpoints import save_checkpoint, tiny_model

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


def pools_of(loaded: LoadedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def pool(heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(2, BLOCK_SIZE, heads, dim, dtype=loaded.dtype)

    return [
        (pool(layer.num_kv_heads, layer.key_dim), pool(layer.num_kv_heads, layer.value_dim))
        for layer in loaded.spec.storing_layers
    ]


def test_no_step_of_an_answer_proves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps of a process were computed twice and their time taken: what they cost was
    believed, and drafts stayed off through its first answers."""
    proving, slots = WholeModel._run_both_ways, []

    def noted(self: WholeModel, batch: Any, *args: Any) -> torch.Tensor:
        slots.append(batch.slot_mapping.tolist())
        return proving(self, batch, *args)

    monkeypatch.setattr(WholeModel, "_run_both_ways", noted)
    engine = build_engine(
        find_model(str(save_checkpoint(tmp_path, tiny_model("llama")))),
        ModelConfig(dtype="bfloat16"),
        CacheConfig(device_bytes=Size(num_bytes=8 << 20), directory=None),
        EngineConfig(),
        None,
        lambda event: None,
    ).engine
    engine.submit(RequestSpec(tuple(range(3, 40)), GREEDY, 8, frozenset()))
    while engine.has_work:
        engine.step()
    kept = engine.cache.kv_pool.layers[0][0]
    engine.close()

    assert [len(step) for step in slots] == [8, 1]
    assert all(slot < BLOCK_SIZE for step in slots for slot in step), "in the scratch block"
    assert kept.isfinite().all()


def test_what_is_still_being_fused_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nothing would be found that has to be proven, and the first small step would prove it."""
    may_go_on, work, wait = Event(), _Fuser.work, Fusing.wait

    def held_up(fuser: _Fuser) -> None:
        may_go_on.wait()
        work(fuser)

    def waiting(fusing: Fusing) -> Fusion:
        may_go_on.set()
        return wait(fusing)

    monkeypatch.setattr(_Fuser, "work", held_up)
    monkeypatch.setattr(Fusing, "wait", waiting)
    source = find_model(str(save_checkpoint(tmp_path, tiny_model("llama"))))
    loaded = load_model(source, ModelConfig(dtype="bfloat16"), 320, lambda _: None)
    assert not may_go_on.is_set()

    assert not PagedModel(loaded, pools_of(loaded)).is_checked


def test_it_runs_once_and_only_where_something_is_to_be_proven() -> None:
    steps: list[list[int]] = []
    model: Any = SimpleNamespace(
        device=torch.device("cpu"),
        is_checked=False,
        forward=lambda batch: steps.append(batch.token_ids.tolist()),
    )
    warmup = Warmup(model, 100, BLOCK_SIZE)
    warmup.run()
    warmup.run()
    assert [len(step) for step in steps] == [8, 1]
    assert len({token for step in steps for token in step}) == 9, "equal tokens prove nothing"

    Warmup(model, 100, 8).run()  # too small a block for all of them
    model.is_checked = True
    Warmup(model, 100, BLOCK_SIZE).run()
    assert len(steps) == 2


def test_a_model_that_fails_in_it_is_left_to_fail_where_it_is_asked() -> None:
    def fail(batch: object) -> None:
        raise RuntimeError("no")

    model: Any = SimpleNamespace(device=torch.device("cpu"), is_checked=False, forward=fail)

    Warmup(model, 100, BLOCK_SIZE).run()


@pytest.mark.parametrize("wrong", ["nothing", "angles", "embedding"])
def test_it_refutes_a_whole_that_is_wrong(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token repeated, attention makes the same whatever the angles are; and of a token whose
    embedding is zero nothing becomes anything."""
    source = find_model(str(save_checkpoint(tmp_path, tiny_model("llama"))))
    loaded = load_model(source, ModelConfig(dtype="bfloat16"), 320, lambda _: None)
    assert loaded.fusing is not None
    loaded.fusing.wait()
    whole = loaded.fusing.whole
    assert whole is not None
    loaded.module.get_input_embeddings().weight.data[0] = 0.0
    if wrong == "angles":
        at = Angles.at
        monkeypatch.setattr(Angles, "at", lambda self, positions, end: at(self, 0 * positions, end))
    if wrong == "embedding":
        monkeypatch.setattr(whole, "_embedding", lambda ids: 12 * embedding(ids))
        embedding = loaded.module.get_input_embeddings()

    Warmup(PagedModel(loaded, pools_of(loaded)), loaded.spec.vocab_size, BLOCK_SIZE).run()

    assert whole.is_checked
    assert whole._is_refuted == (wrong != "nothing")
