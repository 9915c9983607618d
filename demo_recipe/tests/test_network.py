"""The training network against plain twins: attention, loss, and transformers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax, scaled_dot_product_attention

from demo_recipe.checkpoint import export, load_network
from demo_recipe.distill import Distillation
from demo_recipe.network import (
    QUERY_CHUNK,
    Attention,
    Geometry,
    Network,
    Rows,
    attended_pieces,
)
from demo_recipe.optimiser import orthogonalise

TINY = Geometry(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def rows_of(ids: torch.Tensor, segments: torch.Tensor, targets: torch.Tensor) -> Rows:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return Rows(ids, positions, segments, targets, torch.ones(ids.shape))


@pytest.mark.parametrize("row_len", [1, 63, QUERY_CHUNK, 2 * QUERY_CHUNK + 77])
def test_attention_in_pieces_and_its_gradients_equal_masked_attention(row_len: int) -> None:
    torch.manual_seed(0)
    segments = torch.randint(0, 3, (2, row_len)).sort(1).values
    heads = [torch.randn(2 * row_len, count, 16, requires_grad=True) for count in (4, 2, 2)]
    is_seen = (segments[:, :, None] == segments[:, None]) & torch.ones(
        row_len, row_len
    ).tril().bool()
    query, key, value = (head.unflatten(0, (2, row_len)).transpose(1, 2) for head in heads)
    masked = scaled_dot_product_attention(
        query, key, value, is_seen[:, None], enable_gqa=True, scale=1.0
    )
    weights = torch.randn(2 * row_len, 4, 16)

    attended = Attention.apply(*heads, attended_pieces(segments))

    expected = masked.transpose(1, 2).flatten(0, 1)
    assert torch.allclose(attended, expected, atol=1e-5)
    found, wanted = (
        torch.autograd.grad((out * weights).sum(), heads, retain_graph=True)
        for out in (attended, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("trusted", [0.0, 0.02, 1.1])
def test_a_pupil_learns_from_the_teacher_and_from_the_text_where_that_is_unlikely(
    trusted: float,
) -> None:
    teacher, pupil = Network(TINY, seed=1), Network(TINY, seed=2)
    ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    targets = torch.where(ids % 3 == 0, -100, ids)
    weights = torch.rand(2, 40)
    rows = replace(rows_of(ids, torch.ones_like(ids), targets), weights=weights)
    learnt, expected = (
        log_softmax(network.learnt_logits(rows, torch.float32), -1) for network in (pupil, teacher)
    )
    said = targets[targets != -100]

    loss = Distillation(teacher, torch.float32, trusted)(pupil, rows)

    places = torch.arange(len(said))
    from_text = -learnt[places, said] * weights[targets != -100]
    from_teacher = (expected.exp() * (expected - learnt)).sum(-1)
    by_hand = torch.where(expected.exp()[places, said] < trusted, from_text, from_teacher)
    assert torch.allclose(loss, by_hand.mean(), rtol=1e-4)


def test_the_same_rows_give_the_same_gradients_every_time() -> None:
    """A run cut short resumed to other weights: of an embedding read by an index the gradients
    of two threads are added up atomically, in any order, once they are 32,768 numbers or more."""
    network = Network(TINY)
    ids = torch.randint(0, 8, (4, 256), generator=torch.Generator().manual_seed(1))
    rows = rows_of(ids, torch.ones_like(ids), ids)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = [_embedding_gradient(network, rows) for _ in range(12)]
    finally:
        torch.set_num_threads(num_threads)

    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def _embedding_gradient(network: Network, rows: Rows) -> torch.Tensor:
    network.zero_grad()
    network.hidden(rows, torch.float32).square().sum().backward()
    gradient = network.model.embed_tokens.weight.grad
    assert gradient is not None
    return gradient.clone()


def test_a_chat_is_blind_to_its_neighbours_in_the_row() -> None:
    network = Network(TINY)
    ids = torch.randint(0, 97, (1, 40))
    segments = torch.tensor([[1] * 15 + [2] * 25])
    other = ids.clone()
    other[0, :15] = torch.randint(0, 97, (15,))

    one, two = (network.hidden(rows_of(x, segments, x), torch.float32) for x in (ids, other))

    assert torch.equal(one[0, 15:], two[0, 15:])
    assert not torch.equal(one[0, :15], two[0, :15])


def test_the_loss_is_the_weighted_mean_over_learnt_tokens() -> None:
    network = Network(TINY)
    ids = torch.randint(0, 97, (2, 30))
    targets = torch.where(torch.rand(2, 30) < 0.5, torch.randint(0, 97, (2, 30)), -100)
    rows = replace(rows_of(ids, torch.ones_like(ids), targets), weights=torch.rand(2, 30))

    logits = network.logits(network.hidden(rows, torch.float32)).flatten(0, 1)
    losses = cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="none")
    is_learnt = targets.flatten() != -100
    weights = rows.weights.flatten() * is_learnt

    expected = (losses * weights).sum() / weights.sum()
    assert torch.allclose(network.loss(rows, torch.float32), expected, atol=1e-5)


def test_exported_files_have_the_rounded_weights_and_transformers_agrees(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    network = Network(TINY, seed=5)
    export(tmp_path, network, bos_id=1, end_id=2, pad_id=0)
    mine = load_network(tmp_path)
    assert mine.geometry == TINY
    for rounded, whole in zip(mine.parameters(), network.parameters(), strict=True):
        assert torch.equal(rounded, whole.bfloat16().float())

    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 97, (1, 50))
    with torch.inference_mode():
        expected = theirs(ids).logits[0]
        rows = rows_of(ids, torch.ones_like(ids), ids)
        logits = mine.logits(mine.hidden(rows, torch.float32))[0]

    assert torch.allclose(logits, expected, atol=1e-4)
    assert theirs.generation_config.eos_token_id == [2]


def test_muon_updates_are_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((3, 32, 64), (2, 64, 32)):
        update = orthogonalise(torch.randn(shape))
        values = torch.linalg.svdvals(update.float())
        assert values.min() > 0.4
        assert values.max() < 1.4
