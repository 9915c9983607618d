"""Courses, odd values and weighted tokens: what the second round is made of."""

import random
import re
from collections.abc import Iterator

import pytest

from demo_recipe.dialogues import practice
from demo_recipe.grammar import Grade, is_held_out_value
from demo_recipe.invented import made_odd
from demo_recipe.paths import TARGET
from demo_recipe.scene import Chat, Scene, Turn
from demo_recipe.scores import judge
from demo_recipe.texts import WORDS
from demo_recipe.tokenizer import ChatTokenizer, key_spans
from demo_recipe.voice import Voice


def scenes(count: int = 200, oddity: float = 0.5) -> Iterator[Scene]:
    rng = random.Random(5)
    for _ in range(count):
        yield Scene(rng, Grade.TRAIN, Voice.draw(rng), oddity=oddity)


@pytest.mark.parametrize("course", [practice.quiz, practice.correction], ids=lambda f: f.__name__)
def test_every_reply_of_a_course_passes_its_own_judgement(course: practice.Course) -> None:
    for scene in scenes():
        for turn in [*course(scene), *course(scene), *course(scene), *course(scene)]:
            assert judge(turn.reply, turn).is_good, turn
        assert scene.num_held_out == 0


def test_a_correction_ends_with_the_last_value_being_recalled() -> None:
    for scene in scenes():
        turns = practice.correction(scene)

        last = list(scene.facts.values())[-1]
        assert turns[-1].skill == "recall"
        assert last.value in turns[-1].reply
        assert any(turn.reply == f"Updated: {last.clause}." for turn in turns)


def test_odd_values_keep_their_shape_and_stay_out_of_the_test_set() -> None:
    rng = random.Random(2)
    values = [value for words in (WORDS["foods"], WORDS["chores"]) for value in words.trained]
    odd = [(value, made_odd(value, rng)) for value in values * 5]

    assert sum(value != other for value, other in odd) > len(odd) / 2
    for value, other in odd:
        assert value.count(" ") == other.count(" ")
        assert not is_held_out_value(other)
        assert re.fullmatch(r"[a-zA-Z' -]+", other), other


def test_the_tokens_that_count_more_are_those_of_the_value() -> None:
    tokenizer = ChatTokenizer.load(TARGET)
    turn = Turn("Where am I?", "You live in Bilbao.", "recall", all=(("Bilbao",),))
    encoded = tokenizer.encode_chat(Chat("Be kind.", (turn,)))

    keys = [t for t, is_key in zip(encoded.ids, encoded.is_key, strict=True) if is_key]

    assert tokenizer.decode(keys).strip() == "Bilbao"
    assert key_spans(turn) == [(12, 18)]
