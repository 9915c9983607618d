"""The training network against plain twins: attention, loss, and transformers."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax, scaled_dot_product_attention

from demo_recipe.checkpoint import export, load_network
from demo_recipe.distill import Distillation
from demo_recipe.network import QUERY_CHUNK, Geometry, Network, Rows, attend_within, segment_mask
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


@pytest.mark.parametrize("row_len", [1, 63, QUERY_CHUNK, QUERY_CHUNK + 77])
def test_chunked_attention_equals_masked_attention(row_len: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, row_len, 16)
    key, value = torch.randn(2, 2, row_len, 16), torch.randn(2, 2, row_len, 16)
    segments = torch.randint(0, 3, (2, row_len)).sort(1).values
    mask = (segments[:, :, None] == segments[:, None]) & torch.ones(row_len, row_len).tril().bool()

    expected = scaled_dot_product_attention(query, key, value, mask[:, None], enable_gqa=True)

    attended = attend_within(query, key, value, segment_mask(segments))
    assert torch.allclose(attended, expected, atol=1e-5)


def test_the_draft_learns_the_distribution_of_the_target_over_the_replies() -> None:
    teacher, pupil = Network(TINY, seed=1), Network(TINY, seed=2)
    ids = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    targets = torch.where(ids % 3 == 0, -100, ids)
    rows = rows_of(ids, torch.ones_like(ids), targets)
    learnt, expected = (
        log_softmax(network.logits(network.hidden(rows, torch.float32)), -1)[targets != -100]
        for network in (pupil, teacher)
    )

    loss = Distillation(teacher, torch.float32)(pupil, rows)

    by_hand = (expected.exp() * (expected - learnt)).sum(-1).mean()
    assert torch.allclose(loss, by_hand, rtol=1e-4)


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


def test_the_loss_is_the_mean_over_learnt_tokens() -> None:
    network = Network(TINY)
    ids = torch.randint(0, 97, (2, 30))
    targets = torch.where(torch.rand(2, 30) < 0.5, torch.randint(0, 97, (2, 30)), -100)
    rows = rows_of(ids, torch.ones_like(ids), targets)

    logits = network.logits(network.hidden(rows, torch.float32))
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    assert torch.allclose(network.loss(rows, torch.float32), expected, atol=1e-5)


def test_a_token_of_weight_three_counts_as_three() -> None:
    network = Network(TINY)
    ids = torch.randint(0, 97, (1, 20))
    targets = torch.where(torch.arange(20) % 2 == 0, ids, -100)
    weights = torch.where(torch.arange(20) < 10, 3.0, 1.0)[None]
    rows = Rows(ids, torch.arange(20)[None], torch.ones_like(ids), targets, weights)

    logits = network.logits(network.hidden(rows, torch.float32))[0]
    left, right = (
        cross_entropy(logits[part], targets[0, part], ignore_index=-100)
        for part in (slice(0, 10), slice(10, 20))
    )

    assert torch.allclose(network.loss(rows, torch.float32), (3 * left + right) / 4, atol=1e-5)


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
