"""Models with recurrent state give the answers of a full recompute, and reuse what is cached.

Every type: three turns, two samples, an edit, a batch, and a restart from the disk.
"""

from pathlib import Path

import pytest

from kvchat.model.self_test import compare_with_own
from support.stateful_models import NUM_GENERATED, STATEFUL, Chat, load_stateful, open_engine, words

BLOCK = 16


@pytest.mark.parametrize("name", STATEFUL)
def test_answers_are_those_of_a_full_recompute(name: str, tmp_path: Path) -> None:
    reference, loaded = load_stateful(name, tmp_path / "model")
    assert compare_with_own(loaded) > 0.9999
    chat = Chat(reference, open_engine(loaded, tmp_path / "kv"))
    context: list[int] = []
    ends = []
    for turn in range(3):
        prompt = [*context, *words(61 if turn == 0 else 11, seed=turn)]
        first, second = chat.ask(prompt, num_samples=2)
        assert first.ids == second.ids == chat.right_answer(prompt), f"turn {turn}"
        assert first.num_cached >= len(context) - BLOCK if turn else first.num_cached == 0
        ends.append(prompt + first.ids)
        context = ends[-1]

    edited = [*ends[0], *words(13, seed=77)]
    others = [[*context, *words(5, seed=9)], edited, words(40, seed=8)]
    answers = chat.ask(*others)
    assert [a.ids for a in answers] == [chat.right_answer(ids) for ids in others]
    assert answers[1].num_cached >= len(ends[0]) - 2 * BLOCK
    chat.engine.close()

    again = Chat(reference, open_engine(loaded, tmp_path / "kv"))
    continued = [*others[0], *answers[0].ids, *words(7, seed=5)]
    [answer] = again.ask(continued)
    again.engine.close()
    assert answer.ids == chat.right_answer(continued)
    known = len(others[0]) + NUM_GENERATED - 1
    assert answer.num_from_disk >= known - BLOCK, "the state was not restored"
