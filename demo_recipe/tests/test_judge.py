"""Required and forbidden words: what counts as a good reply."""

from demo_recipe.judge import judge


def test_one_alternative_of_every_group_is_required() -> None:
    groups = (("/undo", "/redo"), ("turn",))

    assert judge("Use /redo for the last turn.", groups).is_good
    assert judge("Use /redo.", groups).missing == ("turn",)


def test_a_forbidden_pattern_spoils_a_good_reply() -> None:
    verdict = judge("You live in Rome, no, in Oslo.", (("oslo",),), ("rome",))

    assert not verdict.is_good
    assert verdict.forbidden == ("rome",)


def test_letter_case_does_not_matter_and_word_borders_do() -> None:
    assert judge("Your name is TIM.", ((r"\btim\b",),)).is_good
    assert not judge("That is 131.", ((r"\b13\b",),)).is_good


def test_an_empty_reply_satisfies_only_an_empty_demand() -> None:
    assert judge("", ()).is_good
    assert not judge("", (("x",),)).is_good
