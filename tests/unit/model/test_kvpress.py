"""Slots are scored as kvpress scores them, which is the work of other people: SnapKV and KVzip."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvchat.engine.kv_thinner import neighbours_highest, neighbours_mean
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.paged_model import PagedModel
from kvchat.model.slot_scores import SlotScores, score_slots
from support.specimens import Specimen, random_ids

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed: its pip package wants an older transformers"
)

BLOCK, BLOCKS = 16, list(range(1, 20))
IDS, NUM_LAST = random_ids(100, 1), 18
Score = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], None]


@torch.inference_mode()
def scores_of(made: Specimen, context: list[int], part: list[int], num_slots: int) -> SlotScores:
    """The scores of a part that follows a context, by a compiled step."""
    pools = [
        (torch.zeros(20, BLOCK, *one), torch.zeros(20, BLOCK, *other))
        for one, other in (
            ((each.num_kv_heads, each.key_dim), (each.num_kv_heads, each.value_dim))
            for each in made.loaded.spec.storing_layers
        )
    ]
    model = PagedModel(made.loaded, pools)
    assert model.compiled is not None
    scores = SlotScores(made.loaded.spec, num_slots)
    pieces = [SequencePiece(context, 0, BLOCKS, 1), SequencePiece(part, len(context), BLOCKS, 1)]
    batches = [build_batch([piece], BLOCK, model.device) for piece in pieces]
    model.forward(batches[0])
    score_slots(model, batches[1], scores, writes=True)
    return scores


@torch.inference_mode()
def read(model: PreTrainedModel, ids: list[int], cache: DynamicCache, score: Score) -> None:
    """Read ids; after each layer `score` gets its module, its input, and all keys and values."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        own = cache.layers[module.layer_idx]
        score(module, kwargs["hidden_states"], own.keys, own.values, kwargs)

    modules = [layer.self_attn for layer in model.model.layers]
    hooks = [each.register_forward_hook(hook, with_kwargs=True) for each in modules]
    model(torch.tensor([ids]), past_key_values=cache)
    for each in hooks:
        each.remove()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_question_scores_slots_as_snapkv(name: str, specimen: Callable[[str], Specimen]) -> None:
    """Not so at both ends, where kvpress averages over zeros outside."""
    made = specimen(name)
    press, found = kvpress.SnapKVPress(window_size=NUM_LAST, kernel_size=5), []

    def score(module: Any, x: torch.Tensor, keys: Any, values: Any, kwargs: Any) -> None:
        found.append(press.score(module, x, keys, values, None, kwargs))

    read(made.reference, IDS, DynamicCache(), score)
    theirs = torch.stack(found).mean(dim=(0, 1, 2))[: len(IDS) - NUM_LAST] * NUM_LAST

    own = scores_of(made, IDS[:-NUM_LAST], IDS[-NUM_LAST:], len(IDS))
    inside = slice(2, len(IDS) - NUM_LAST - 2)
    ours = neighbours_mean(own.sums.mean(dim=0))
    assert torch.allclose(ours[inside], theirs[inside], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_repeated_text_scores_slots_as_kvzip(name, specimen):
    made, part = specimen(name), IDS[40:70]
    press, cache = kvpress.KVzipPress(compression_ratio=0.5), DynamicCache()
    press.context_length = press.end_idx = len(IDS)
    config = made.reference.config
    heads = config.num_hidden_layers, 1, config.num_key_value_heads
    press.score_val = torch.zeros(*heads, len(IDS))

    def score(module: Any, x: torch.Tensor, keys: Any, values: Any, kwargs: Any) -> None:
        press.score_kvzip(module, x, keys, values, None, kwargs)

    read(made.reference, IDS, cache, lambda *_: None)
    read(made.reference, part, cache, score)
    theirs = press.score_val.mean(dim=(0, 1, 2))

    own = scores_of(made, IDS, part, len(IDS)).highest.mean(dim=0)
    assert torch.allclose(own, theirs, rtol=1e-4, atol=1e-6)
    assert torch.allclose(neighbours_highest(own), neighbours_highest(theirs), rtol=1e-4)
