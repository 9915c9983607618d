"""Patterns expand as written, and what is held out of training stays out."""

import random

import pytest

from demo_recipe.grammar import Grade, Phrases, Words, is_held_out_value

WIDE = Phrases("""
    (what is|what's|tell me) (my|the) {a} [again|please];
    (do you|can you) (remember|recall|say) (my|the) {a} [now|still];
    where is (my|the) {a} [today|these days|at the moment]
""")
MANY = Words(", ".join(f"word{number}" for number in range(300)))


def test_choices_options_and_slots_expand_to_every_combination() -> None:
    phrases = Phrases("(a|b) [x] {slot}")

    assert {p.text for p in phrases.all()} == {"a {slot}", "a x {slot}", "b {slot}", "b x {slot}"}


def test_semicolons_separate_patterns_and_line_breaks_are_spaces() -> None:
    phrases = Phrases("(one|two|\n    three); four; five")

    assert [p.text for p in phrases.all()] == ["one", "two", "three", "four", "five"]


@pytest.mark.parametrize("line", ["(a|b", "a)", "[a", "a]b"])
def test_an_unbalanced_pattern_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="unbalanced"):
        _ = Phrases(line).patterns


def test_drawing_for_training_never_yields_a_held_out_phrasing() -> None:
    rng = random.Random(1)

    drawn = [WIDE.draw(rng, Grade.TRAIN) for _ in range(2000)]

    assert not any(phrasing.is_held_out for phrasing in drawn)
    assert any(phrasing.is_held_out for phrasing in WIDE.all())


def test_the_unseen_grade_mostly_yields_held_out_phrasings() -> None:
    rng = random.Random(1)

    drawn = [WIDE.draw(rng, Grade.UNSEEN).is_held_out for _ in range(500)]

    assert 0.5 < sum(drawn) / len(drawn) < 0.9


def test_values_are_either_trained_or_held_out() -> None:
    assert set(MANY.trained).isdisjoint(MANY.held_out)
    assert set(MANY.trained) | set(MANY.held_out) == set(MANY.all)
    assert 0.05 < len(MANY.held_out) / len(MANY.all) < 0.15


def test_a_small_set_is_trained_whole_and_can_still_be_tested_with() -> None:
    few = Words("red, green, blue")

    assert few.trained == few.held_out == few.all


def test_a_value_is_held_out_in_any_letter_case() -> None:
    held_out = next(word for word in MANY.all if is_held_out_value(word))

    assert is_held_out_value(held_out.upper())
