"""Models with recurrent state give the answers of a full recompute, and reuse what is cached.

Every type: three turns, two samples, an edit, a batch, and a restart from the disk.
"""

import sqlite3
from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvchat.model.batch import SequencePiece
from kvchat.model.self_test import compare_with_own
from support.matrix import spread
from support.stateful_models import (
    FORMS,
    NUM_GENERATED,
    STATEFUL,
    Chat,
    Loaded,
    load_stateful,
    open_engine,
    words,
)

BLOCK = 16


@pytest.mark.parametrize("name", spread(STATEFUL, FORMS[:4]))
def test_answers_are_those_of_a_full_recompute(name: str, tmp_path: Path) -> None:
    reference, loaded = load_stateful(name, tmp_path / "model")
    assert compare_with_own(loaded) > 0.9999
    chat = Chat(reference, open_engine(loaded, tmp_path / "kv"))
    context: list[int] = []
    ends = []
    for turn in range(3):
        prompt = [*context, *words(61 if turn == 0 else 11, seed=turn)]
        first, second = chat.ask(prompt, num_samples=2)
        assert first.ids == second.ids == chat.right_answer(prompt, first.ids), f"turn {turn}"
        assert first.num_cached >= len(context) - BLOCK if turn else first.num_cached == 0
        ends.append(prompt + first.ids)
        context = ends[-1]

    edited = [*ends[0], *words(13, seed=77)]
    others = [[*context, *words(5, seed=9)], edited, words(40, seed=8)]
    answers = chat.ask(*others)
    for prompt, other in zip(others, answers, strict=True):
        assert other.ids == chat.right_answer(prompt, other.ids)
    assert answers[1].num_cached >= len(ends[0]) - 2 * BLOCK
    chat.engine.close()

    again = Chat(reference, open_engine(loaded, tmp_path / "kv"))
    continued = [*others[0], *answers[0].ids, *words(7, seed=5)]
    [answer] = again.ask(continued)
    again.engine.close()
    assert answer.ids == chat.right_answer(continued, answer.ids)
    known = len(others[0]) + NUM_GENERATED - 1
    assert answer.num_from_disk >= known - BLOCK, "the state was not restored"


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_stateful("lfm2", tmp_path_factory.mktemp("lfm2"))


def test_a_damaged_snapshot_is_a_miss(lfm2: Loaded, tmp_path: Path) -> None:
    prompt = words(90, seed=1)
    chat = Chat(lfm2[0], open_engine(lfm2[1], tmp_path))
    [before] = chat.ask(prompt)
    chat.engine.close()
    assert damage_snapshots(tmp_path) > 0

    chat = Chat(lfm2[0], open_engine(lfm2[1], tmp_path))
    [after] = chat.ask(prompt)
    status = chat.engine.status().tier("disk")
    chat.engine.close()
    assert after.ids == before.ids
    assert after.num_from_disk == 0
    assert status is not None
    assert status.num_damaged > 0


def test_a_snapshot_is_found_that_was_written_with_its_lost_context(lfm2, tmp_path):
    """Another process has emptied the store. What was written again was one pack, and a snapshot is
    looked up by its first block: it was never found, and never written again.
    """
    prompt = words(90, seed=1)
    chat = Chat(lfm2[0], open_engine(lfm2[1], tmp_path))
    chat.ask(prompt)
    assert chat.engine.chain.flush(60.0)
    [table] = tmp_path.glob("*/cache.db")
    with closing(sqlite3.connect(table)) as connection:
        connection.execute("DELETE FROM Pack")
        connection.commit()
    chat.ask([*prompt[:60], 7])  # all of its KV was written; there is a snapshot more
    assert chat.engine.chain.flush(60.0)
    chat.engine.chain.go_on(60.0)
    chat.engine.close()

    chat = Chat(lfm2[0], open_engine(lfm2[1], tmp_path))
    [after] = chat.ask([*prompt[:60], 9])
    chat.engine.close()
    assert after.num_from_disk == 48


def damage_snapshots(directory: Path) -> int:
    """Flip the last byte of every stored snapshot; return how many there are."""
    [table] = directory.glob("*/cache.db")
    with closing(sqlite3.connect(table)) as connection:
        hit = []
        for key, ids, payload in connection.execute("SELECT key, ids, payload FROM Pack"):
            if array("i", ids)[0] < 0:
                hit.append((payload[:-1] + bytes([payload[-1] ^ 1]), key))
        connection.executemany("UPDATE Pack SET payload = ? WHERE key = ?", hit)
        connection.commit()
    return len(hit)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_failed_step_of_a_batch_changes_no_state(lfm2: Loaded, is_compiled: bool) -> None:
    """The requests of a failed step run again alone: a state advanced twice gives other tokens."""
    chat = Chat(lfm2[0], open_engine(lfm2[1], None))
    model = chat.engine._runner._model
    if not is_compiled:
        model.compiled = None
    forward, forward_alone = model.forward_pieces, model._forward_piece
    sizes: list[int] = []
    failed: list[str] = []

    def failing(pieces: Sequence[SequencePiece], block_size: int) -> torch.Tensor:
        sizes.append(len(pieces))
        # The prompts run in parts: one of the second, when the first has advanced.
        if len(sizes) == 4:
            failed.append("a prompt")
            raise RuntimeError("a passing fault")
        return forward(pieces, block_size)

    def failing_alone(piece: SequencePiece, block_size: int) -> torch.Tensor:
        if sizes[-3:] == [2, 1, 1] and len(failed) == 1:  # the second of two, by the modules
            failed.append("a decode")
            raise RuntimeError("a passing fault")
        return forward_alone(piece, block_size)

    model.forward_pieces, model._forward_piece = failing, failing_alone
    prompts = [words(20, seed=1), words(21, seed=2)]
    answers = chat.ask(*prompts)
    del model.forward_pieces, model._forward_piece
    assert failed == ["a prompt"] if is_compiled else ["a prompt", "a decode"]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == chat.right_answer(prompt, answer.ids)


def test_requests_that_decode_run_in_one_step(lfm2: Loaded) -> None:
    """Each read all weights by itself: four clients had as many tokens together as one."""
    chat = Chat(lfm2[0], open_engine(lfm2[1], None))
    model = chat.engine._runner._model
    forward, sizes = model.forward_pieces, []

    def noted(pieces: Sequence[SequencePiece], block_size: int) -> torch.Tensor:
        sizes.append([len(piece.token_ids) for piece in pieces])
        return forward(pieces, block_size)

    model.forward_pieces = noted
    prompts = [words(length, seed=length) for length in (3, 20, 37, 50)]
    answers = chat.ask(*prompts)
    del model.forward_pieces

    decodes = [of_step for of_step in sizes if set(of_step) == {1}]
    assert decodes.count([1, 1, 1, 1]) >= NUM_GENERATED // 2
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == chat.right_answer(prompt, answer.ids)


def test_a_preempted_request_goes_on_from_its_last_snapshot(lfm2: Loaded) -> None:
    chat = Chat(lfm2[0], open_engine(lfm2[1], None))
    engine, prompts = chat.engine, [words(70, seed=3), words(75, seed=4)]
    chat.preempt_at(5, 8)
    answers = chat.ask(*prompts)
    assert engine.status().num_preempted == 2
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == chat.right_answer(prompt, answer.ids)
    computed = sum(map(len, prompts)) + 2 * (NUM_GENERATED - 1)
    assert engine.status().num_tokens_computed <= computed + 2 * BLOCK


def test_a_snapshot_goes_to_host_memory_and_back(lfm2: Loaded) -> None:
    engine = open_engine(lfm2[1], None, num_bytes=16 * 4096, host_bytes=8 << 20)
    chat = Chat(lfm2[0], engine)
    prompt = words(100, seed=6)
    [first] = chat.ask(prompt)
    for seed in range(4):
        chat.ask(words(120, seed=100 + seed))
    assert engine.cache.num_reusable_tokens(prompt) == 0

    [second] = chat.ask([*prompt, *first.ids, 7])
    assert second.ids == chat.right_answer([*prompt, *first.ids, 7], second.ids)
    assert second.num_from_host >= len(prompt) - BLOCK
    engine.close()
