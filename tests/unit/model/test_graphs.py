"""Small steps through the tensors of a captured graph are the eager steps, at any length.

There is no GPU here: a recorder takes the place of a graph and runs the captured step again over
its static tensors. The tests compare buffers, padding, buckets and the fallback with the eager
pass; tests/gpu tests the capture itself.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvchat.model.batch import SequencePiece
from kvchat.model.gpu.graphs import SHAPES
from kvchat.model.gpu.step_buffers import StepBuffers, StepShape
from kvchat.model.loader import LoadedModel
from kvchat_kernels.sampler import RowDraw, SamplerRows, sample_tokens
from kvchat_kernels.slot_positions import SlotPositions
from support.graph_recorder import Broken, Recorder
from support.matrix import spread
from support.paged_scene import MAX_CONTEXT, Scene, load_tiny
from support.row_draws import sampler_rows

Load = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    loaded: dict[str, LoadedModel] = {}

    def get(name: str) -> LoadedModel:
        if name not in loaded:
            loaded[name] = load_tiny(name, Path(tmp_path_factory.mktemp("model")))
        return loaded[name]

    return get


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 16])
def test_decodes_are_the_eager_ones(num_rows: int, load: Load) -> None:
    scene = Scene(load("llama"), Recorder())
    pieces = [scene.read(7 * row + 1, [row + 3]) for row in range(num_rows)]
    scene.capture_for(pieces)

    scene.check(pieces)

    assert scene.graphs.status().num_replayed == 1


@pytest.mark.parametrize("name", ["llama", "mistral, window", "gpt_oss, sinks", "qwen3_moe"])
@pytest.mark.parametrize("num_drafts", [1, 4, 6, 16])
def test_verifications_are_the_eager_ones(num_drafts: int, name: str, load: Load) -> None:
    scene = Scene(load(name), Recorder())
    piece = scene.read(30, range(5, 6 + num_drafts))
    scene.capture_for([piece])

    scene.check([piece])


def test_what_was_captured_for_padding_alone_is_right_at_any_length(load: Load) -> None:
    """Lengths of 1 at capture; of hundreds, up to the last token there is room for, at replay."""
    scene = Scene(load("mistral, window"), recorder := Recorder(), num_blocks=300)
    scene.capture_for([scene.read(0, [1])])
    scene.capture_for([scene.read(0, [1, 2, 3])])

    for context in (0, 1, 7, 8, 62, 63, 256, MAX_CONTEXT - 3):
        scene.check([scene.read(context, [9, 8, 7])])
        scene.check([scene.read(context, [9])])

    assert recorder.num_captured == 2


def test_pieces_of_any_mixture_fit_the_same_graph(load: Load) -> None:
    """Verified drafts differ in number, and a request without drafts runs beside them."""
    scene = Scene(load("llama"), recorder := Recorder())
    scene.capture_for([scene.read(9, [1, 2, 3, 4, 5]) for _ in range(4)])

    scene.check([scene.read(40, [1]), scene.read(3, [4, 4, 4, 4, 4]), scene.read(70, [6, 7])])
    scene.check([scene.read(11, [1, 2, 3, 4])])
    scene.check([scene.read(5 * n, [n]) for n in range(1, 6)])

    assert recorder.num_captured == 1


def test_only_the_rows_asked_for_come_back_in_order(load: Load) -> None:
    scene = Scene(load("llama"), Recorder())
    first, second = scene.read(20, [1, 2, 3, 4]), scene.read(33, [5, 6])
    pieces = [
        SequencePiece(first.token_ids, first.start, first.blocks, 2),
        SequencePiece(second.token_ids, second.start, second.blocks, 0),
    ]
    scene.capture_for(pieces)

    assert scene.check(pieces).shape[0] == 2
    scene.check([second, pieces[0]])


def test_what_was_returned_is_the_callers_own(load: Load) -> None:
    scene = Scene(load("llama"), Recorder())
    one, other = scene.read(20, [1]), scene.read(33, [5])
    scene.capture_for([one])
    logits = scene.check([one])
    kept = logits.clone()

    scene.check([other])

    assert torch.equal(logits, kept)


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_padding_of_more_tokens_than_a_block_holds_harms_nobody(block_size, load):
    scene = Scene(load("llama"), Recorder(), block_size, 400 // block_size)
    scene.capture_for([scene.read(2, list(range(2, 19)))])

    scene.check([scene.read(45, list(range(10)))])


@pytest.mark.parametrize("seed", spread(range(3), [0]))
def test_any_steps_in_any_order_are_the_eager_ones(seed: int, load: Load) -> None:
    """Contexts grow, end and begin; tables change hands; graphs are captured in between."""
    choose = random.Random(seed)
    scene = Scene(load("mistral, window"), Recorder(), num_blocks=600)
    growing: list[SequencePiece] = []
    num_checked = 0
    for _ in range(60):
        if len(growing) < 5 and choose.random() < 0.5:
            growing.append(scene.read(choose.randrange(40), [1]))
        chosen = [piece for piece in growing if choose.random() < 0.8]
        if not chosen:
            continue
        step = [_with_drafts(scene, piece, choose) for piece in chosen]
        scene.graphs.capture_wanted()
        if scene.graphs.run(step) is None:
            scene.eager(step)
        else:
            scene.check(step)
            num_checked += 1
        for piece, grown in zip(chosen, step, strict=True):
            growing.remove(piece)
            kept = choose.randint(1, len(grown.token_ids))
            if choose.random() < 0.9:
                growing.append(SequencePiece([1], grown.start + kept, grown.blocks, 1))
    assert num_checked > 10


def _with_drafts(scene: Scene, piece: SequencePiece, choose: random.Random) -> SequencePiece:
    ids = [choose.randrange(256) for _ in range(choose.choice((1, 1, 1, 2, 4)))]
    blocks = list(piece.blocks)
    while len(blocks) * scene.block_size < piece.start + len(ids):
        block = scene._free.pop()
        for tensor in scene.tensors():
            tensor[block] = 0
        blocks.append(block)
    return SequencePiece(ids, piece.start, blocks, len(ids))


# What is drawn in the graph


def drawn_eagerly(scene: Scene, pieces: list[SequencePiece], draws: list[RowDraw]) -> list[int]:
    rows = [
        (draw, piece.end - piece.num_logit_rows + row + 1)
        for draw, piece in zip(draws, pieces, strict=True)
        for row in range(piece.num_logit_rows)
    ]
    how = sampler_rows([draw for draw, _ in rows], [position for _, position in rows])
    tokens: list[int] = sample_tokens(scene.eager(pieces), how).tolist()
    return tokens


def test_tokens_are_drawn_as_from_the_eager_logits_however_each_row_draws(load: Load) -> None:
    scene = Scene(load("llama"), recorder := Recorder())
    pieces = [scene.read(12, [1, 2, 3]), scene.read(40, [7]), scene.read(5, [4, 4])]
    scene.capture_for(pieces)
    choose = random.Random(0)
    seen = set()
    for _ in range(12):
        draws = [
            RowDraw(
                choose.choice((0.0, 0.7, 1.6)),
                choose.choice((0, 5, 60)),
                choose.choice((1.0, 0.8)),
                choose.choice((0.0, 0.05)),
                choose.randrange(-(2**63), 2**63),
            )
            for _ in pieces
        ]
        some = choose.randint(1, 3)
        drawn = scene.graphs.draw(pieces[:some], draws[:some])
        assert drawn is not None
        assert drawn.tolist() == drawn_eagerly(scene, pieces[:some], draws[:some])
        seen.add(tuple(drawn.tolist()))
    assert len(seen) > 6
    assert recorder.num_captured == 1


def test_a_piece_that_asks_for_no_logits_draws_no_token(load: Load) -> None:
    scene = Scene(load("llama"), Recorder())
    first, second = scene.read(20, [1, 2]), scene.read(33, [5, 6])
    silent = SequencePiece(second.token_ids, second.start, second.blocks, 0)
    scene.capture_for([first, second])
    greedy = RowDraw()

    drawn = scene.graphs.draw([silent, first], [None, greedy])

    assert drawn is not None
    assert drawn.tolist() == drawn_eagerly(scene, [first], [greedy])


def test_logits_that_are_not_numbers_are_no_token(load: Load) -> None:
    scene = Scene(load("llama"), Recorder())
    good, bad = scene.read(9, [1]), scene.read(17, [2])
    scene.capture_for([good, bad])
    for tensor in scene.tensors():
        tensor[list(bad.blocks)] = float("nan")

    drawn = scene.graphs.draw([good, bad], [RowDraw(), RowDraw(temperature=1.0)])

    assert drawn is not None
    assert drawn[0] >= 0
    assert drawn[1] == -1


def test_token_ids_can_come_from_the_device_where_the_host_does_not_know_them(load: Load) -> None:
    """-1 stands for a logit that was NaN: it has no embedding, and id 0 is read in its place."""
    scene = Scene(load("llama"), Recorder())
    known = [scene.read(9 * row + 5, [token]) for row, token in enumerate((11, 0, 40))]
    unknown = [replace(piece, token_ids=[3]) for piece in known]
    scene.capture_for(known)
    draws = [RowDraw(1.0, 30, 0.9, 0.0, seed) for seed in range(3)]

    drawn = scene.graphs.draw(unknown, draws, torch.tensor([11, -1, 40]))

    assert drawn is not None
    assert drawn.tolist() == drawn_eagerly(scene, known, draws)


def test_asking_for_tokens_in_vain_is_not_counted_twice(load: Load) -> None:
    scene = Scene(load("llama"), Recorder())
    piece = scene.read(20, [1])
    for _ in range(2):
        assert scene.graphs.draw([piece], [RowDraw()]) is None
        assert scene.graphs.run([piece]) is None
    assert scene.graphs.status().num_eager == 2
    assert not scene.graphs.capture_wanted()


def test_a_graph_that_draws_by_other_rules_is_refused(load, monkeypatch):
    """One with seeds baked in, say."""
    scene = Scene(load("llama"), Recorder())
    views = scene.graphs._buffers.sampler_rows
    asked: list[SamplerRows] = []

    def baked(shape: StepShape) -> SamplerRows:
        asked.append(views(shape))
        is_proof = len(asked) == 4  # tried, captured, replayed, and drawn anew
        return replace(asked[-1], temperature=torch.zeros(1)) if is_proof else asked[-1]

    monkeypatch.setattr(StepBuffers, "sampler_rows", lambda _, shape: baked(shape))
    piece = scene.read(20, [1])
    scene.capture_for([piece])

    assert "draws other tokens" in scene.graphs.status().trouble
    assert scene.graphs.run([piece]) is None


# When there is no graph


def test_nothing_is_captured_before_it_was_wanted_a_few_times_nor_by_a_step(load: Load) -> None:
    scene = Scene(load("llama"), recorder := Recorder())
    piece = scene.read(20, [1])

    assert scene.graphs.run([piece]) is None
    assert not scene.graphs.capture_wanted()
    assert [scene.graphs.run([piece]) for _ in range(5)] == [None] * 5
    assert recorder.num_captured == 0
    assert scene.graphs.status().num_eager == 6

    assert scene.graphs.capture_wanted()
    assert not scene.graphs.capture_wanted()
    assert recorder.num_captured == 1


def test_steps_that_no_graph_can_hold_are_left_to_the_eager_pass(load: Load) -> None:
    scene = Scene(load("llama"), Recorder())
    long = SequencePiece([1], MAX_CONTEXT, range(1, 100), 1)
    private = replace(scene.read(9, [1]), table_positions=SlotPositions((), 5))
    for pieces in ([scene.read(3, list(range(30)))], [long], [scene.read(3, [1]), private]):
        for _ in range(4):
            assert scene.graphs.run(pieces) is None
    assert not scene.graphs.capture_wanted()


@pytest.mark.parametrize("how", ["raises", "same numbers for ever"])
def test_a_capture_that_fails_costs_a_sentence(how: str, load: Load) -> None:
    scene = Scene(load("llama"), Broken(how))
    piece, other = scene.read(20, [1]), scene.read(20, [1, 2])

    scene.capture_for([piece])
    assert [scene.graphs.run([piece]) for _ in range(5)] == [None] * 5
    assert not scene.graphs.capture_wanted(), "the same shape was tried again"
    assert scene.graphs.status().trouble.startswith("no graph of 1 rows: RuntimeError")

    scene.capture_for([other])
    third = [scene.read(20, [1]), scene.read(20, [1])]
    assert [scene.graphs.run(third) for _ in range(5)] == [None] * 5
    assert not scene.graphs.capture_wanted(), "a device where it fails is tried for ever"


def test_a_replay_that_fails_leaves_everything_to_the_eager_pass(load: Load) -> None:
    scene = Scene(load("llama"), Broken("later"))
    piece = scene.read(20, [1])
    scene.capture_for([piece])
    scene.check([piece])

    assert scene.graphs.run([piece]) is None
    assert "illegal memory access" in scene.graphs.status().trouble
    assert scene.graphs.status().num_captured == 0
    assert torch.isfinite(scene.eager([piece])).all()


def test_a_model_that_reads_values_on_the_host_is_never_captured(load, monkeypatch):
    scene = Scene(load("llama"), recorder := Recorder())
    forward = scene.model._module.forward

    def nosy(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        assert output.logits.isfinite().all()
        return output

    piece = scene.read(20, [1])
    monkeypatch.setattr(scene.model, "_module", nosy)
    scene.capture_for([piece])

    assert recorder.num_captured == 0
    trouble = scene.graphs.status().trouble
    assert trouble.startswith("this model runs eagerly: the host reads values"), trouble
    assert "test_graphs.py:" in trouble
    assert scene.graphs.run([piece]) is None
    assert not scene.graphs.capture_wanted()


# Shapes


def test_shapes_come_smallest_first_and_hold_every_small_step() -> None:
    sizes = [shape.num_tokens for shape in SHAPES]
    assert sizes == sorted(sizes)
    assert {s for s in SHAPES if s.query_len == 1} == {StepShape(n, 1) for n in (1, 2, 4, 8, 16)}
    for num_tokens in range(1, 18):
        assert any(shape.holds([num_tokens]) for shape in SHAPES)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whatever_a_shape_holds_can_be_laid_out(shape: StepShape) -> None:
    choose = random.Random(str(shape))
    num_held = 0
    for _ in range(60):
        lengths = [choose.randint(1, shape.query_len + 1) for _ in range(choose.randint(1, 20))]
        num_padding = shape.num_tokens - sum(lengths)
        fits = num_padding >= 0 and max(lengths) <= shape.query_len
        padded = lengths + [shape.query_len] * (-(-num_padding // shape.query_len)) if fits else []
        expected = fits and len(padded) <= shape.num_sequences
        assert shape.holds(lengths) == expected
        num_held += expected
    assert num_held
    uniform = [shape.query_len] * shape.num_rows
    assert shape.holds(uniform)
    assert shape.holds(uniform[:1])
