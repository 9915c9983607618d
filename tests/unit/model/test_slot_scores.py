"""A compiled step scores slots as the modules do, whose scores are plain softmax attention."""

from collections.abc import Sequence

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat.model.slot_scores import SlotScores, score_slots
from kvchat_kernels.kv_code import INT4, INT8, K8V4, KvCode
from kvchat_kernels.kv_layer import KvLayer, PlainKv
from kvchat_kernels.slot_positions import SlotPositions
from support.checkpoints import save_checkpoint, tiny_model
from support.coded_kv_checks import zeroed_pools
from support.specimens import random_ids

BLOCK, NUM_READ = 16, 600
BLOCKS = list(range(1, 1 + 60))


def kv_layer(heads: int, key_dim: int, value_dim: int, code: KvCode | None) -> KvLayer:
    if code is not None:
        return zeroed_pools(len(BLOCKS) + 1, BLOCK, heads, key_dim, value_dim, code=code)
    shape = (len(BLOCKS) + 1, BLOCK, heads)
    return PlainKv(torch.zeros(*shape, key_dim), torch.zeros(*shape, value_dim))


def paged(loaded: LoadedModel, code: KvCode | None) -> PagedModel:
    layers = loaded.spec.storing_layers
    pools = [kv_layer(each.num_kv_heads, each.key_dim, each.value_dim, code) for each in layers]
    return PagedModel(loaded, pools)


@torch.inference_mode()
def scores_of(
    model: PagedModel,
    pieces: Sequence[SequencePiece],
    num_slots: int,
    *,
    writes: bool,
    by_modules: bool,
) -> SlotScores:
    scores, compiled = SlotScores(model.loaded.spec, num_slots), model.compiled
    assert compiled is not None
    if by_modules:
        model.compiled = None
    for piece in pieces:
        score_slots(model, build_batch([piece], BLOCK, model.device), scores, writes=writes)
    model.compiled = compiled
    return scores


def assert_alike(ours: SlotScores, plain: SlotScores, within: float) -> None:
    for one, other in ((ours.sums, plain.sums), (ours.highest, plain.highest)):
        assert (one - other).norm() < within * other.norm()
    assert plain.sums.any()


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2, softcap", "gpt_oss, sinks", "gemma3, mixed windows", "mistral, window"],
)
def test_rows_whose_kv_is_there_are_scored_and_write_none(name, specimen):
    """Rows of several groups, of parts that end within a vector, over a table that lacks tokens."""
    model = paged(specimen(name).loaded, None)
    ids = random_ids(NUM_READ, 1)
    model.forward(build_batch([SequencePiece(ids, 0, BLOCKS, 1)], BLOCK, model.device))
    before = [part.clone() for part in model._storage[0][0].tensors]
    first = tuple(place for place in range(433) if not 100 <= place < 207)
    for table in (None, SlotPositions(first, 433)):
        piece = SequencePiece(ids[433:], 433, BLOCKS, 1, table_positions=table)
        both = [
            scores_of(model, [piece], piece.num_slots, writes=False, by_modules=by_modules)
            for by_modules in (False, True)
        ]
        assert_alike(*both, within=1e-4)
        assert torch.equal(both[0].sums > 0, both[1].sums > 0)
    for part, old in zip(model._storage[0][0].tensors, before, strict=True):
        assert torch.equal(part, old)


@pytest.mark.parametrize("code", [None, INT8, K8V4, INT4], ids=["floats", "int8", "k8v4", "int4"])
def test_rows_that_write_their_kv_are_scored_for_the_slots_before_them(code, tmp_path):
    source = find_model(str(save_checkpoint(tmp_path, tiny_model("llama", head_dim=64))))
    loaded = load_model(source, ModelConfig(dtype="float32"), 128, lambda _: None)
    ids, results = random_ids(NUM_READ, 1), []
    for by_modules in (False, True):
        model = paged(loaded, code)
        model.forward(build_batch([SequencePiece(ids[:300], 0, BLOCKS, 1)], BLOCK, model.device))
        pieces = [SequencePiece(ids[at : at + 150], at, BLOCKS, 1) for at in (300, 450)]
        results.append(scores_of(model, pieces, 300, writes=True, by_modules=by_modules))
    assert_alike(*results, within=1e-4 if code is None else 0.02)
