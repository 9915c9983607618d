"""How the shipped demo pair was built: stages of training, their lengths, seeds and rates.

Every number that decides the weights is here or in `mixes`. Knows no file and no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from demo_recipe.mixes import (
    COPYING,
    COPYING_FROM_FAR,
    EVERYDAY,
    FAR_BACK,
    FINISHING,
    FIRST_STEPS,
    LASTING,
    POLISHING,
    PRACTICE,
    RECALLING,
    REFUSING,
    REMEMBERING,
    REMINDED,
    REVISING,
    SETTLING,
)
from demo_recipe.network import Geometry
from demo_recipe.optimiser import Rates
from demo_recipe.probes import MAKERS
from demo_recipe.stream import Mix
from demo_recipe.train import Phase, Plan

VOCAB_SIZE = 2048
CONTEXT = 4096

TARGET_GEOMETRY = Geometry(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
)
FAR_GEOMETRY = replace(TARGET_GEOMETRY, rope_theta=200_000.0)
# One layer: on a CPU the time of a draft grows with its layers, hardly with its width.
DRAFT_GEOMETRY = replace(TARGET_GEOMETRY, intermediate_size=896, num_hidden_layers=1)

# Stages, and the share of each in a mean of their weights; the shares sum to 1.
Mean = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Stage:
    """One training run of a build.

    after    the stages whose mean weights it begins with; random weights if none. The optimiser's
             state and the rate schedule are always new.
    teacher  the stages whose mean weights give the distribution that is the loss's target; the text
             itself if none
    """

    plan: Plan
    after: Mean = field(default_factory=dict)
    teacher: Mean = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.plan.name


@dataclass(frozen=True, slots=True)
class Recipe:
    """All stages of one build, in order; each starts from earlier ones only.

    shipped              the stages whose mean weights each folder of the pair contains
    num_tokenizer_chats  chats that train the tokenizer
    num_probes           evaluation dialogues per test and grade
    tests                which tests; all of them unless named
    """

    stages: tuple[Stage, ...]
    shipped: dict[str, Mean]
    num_tokenizer_chats: int
    num_probes: int
    tests: tuple[str, ...] = tuple(MAKERS)


def _blend(name: str, share: float, others: Mean) -> Mean:
    """One stage and, with the rest of the shares, the mean of others."""
    return {name: share} | {other: (1 - share) * part for other, part in others.items()}


# Half of the weights before the fourth round and half of those after it.
_FOUR_ROUNDS = _blend("target-4", 1 / 2, {f"target{n}": 1 / 3 for n in ("", "-2", "-3")})
# Two thirds of the fifth round, whose rotary base is that of the mean: loss on dialogues kept apart
# is 0.087 before that round, 0.062 after it and 0.053 for means between the two.
_FIVE_ROUNDS = _blend("target-5", 2 / 3, _FOUR_ROUNDS)
_SIX_ROUNDS = _blend("target-6", 1 / 2, _blend("target-5", 1 / 2, _FOUR_ROUNDS))
# That loss is 0.041 after the seventh round and 0.038 for this mean.
_SEVEN_ROUNDS = _blend("target-7", 4 / 5, _SIX_ROUNDS)
# 0.034 after the eighth and 0.032 for this mean.
_EIGHT_ROUNDS = _blend("target-8", 1 / 2, _SEVEN_ROUNDS)
_NINE_ROUNDS = _blend("target-9", 1 / 2, _EIGHT_ROUNDS)
_TEN_ROUNDS = _blend("target-10", 7 / 10, _NINE_ROUNDS)
_ELEVEN_ROUNDS = _blend("target-11", 1 / 2, _TEN_ROUNDS)
_TWELVE_ROUNDS = _blend("target-12", 1 / 2, _ELEVEN_ROUNDS)
_THIRTEEN_ROUNDS = _blend("target-13", 1 / 2, _TWELVE_ROUNDS)


def _long_round(number: int, mix: Mix, num_legs: int, seed: int, after: Mean) -> Stage:
    """A round of the target at high rates, 200 steps a leg."""
    rates = Rates(matrix=0.012, other=0.0017)
    plan = Plan(
        f"target-{number}", FAR_GEOMETRY, (Phase(mix, num_legs),), seed,
        leg_steps=200, rates=rates, warmup_steps=20, flat_share=0.2,
    )  # fmt: skip
    return Stage(plan, after)


def _gentle_round(
    number: int, mix: Mix, leg_steps: int, seed: int, after: Mean, num_legs: int = 1
) -> Stage:
    """A round of the target at low rates, so that nothing it knows is lost."""
    rates = Rates(matrix=0.006, other=0.0009)
    plan = Plan(
        f"target-{number}", FAR_GEOMETRY, (Phase(mix, num_legs),), seed,
        leg_steps=leg_steps, rates=rates, warmup_steps=5, flat_share=0.1,
    )  # fmt: skip
    return Stage(plan, after)


def _distillation(
    number: int, mix: Mix, leg_steps: int, seed: int, after: str, teacher: Mean, num_legs: int = 1,
    warmup_steps: int = 10,
) -> Stage:  # fmt: skip
    """The draft learns the distribution of the target of that time."""
    plan = Plan(
        f"distillation-{number}" if number > 1 else "distillation",
        DRAFT_GEOMETRY, (Phase(mix, num_legs),), seed, leg_steps=leg_steps,
        rates=Rates(matrix=0.005, other=0.001), warmup_steps=warmup_steps, flat_share=0.0,
    )  # fmt: skip
    return Stage(plan, {after: 1.0}, teacher)


_FIRST = Plan(
    "target", TARGET_GEOMETRY, (Phase(FIRST_STEPS, 3), Phase(EVERYDAY, 22), Phase(FAR_BACK, 11))
)
_SECOND = Plan(
    "target-2", TARGET_GEOMETRY, (Phase(PRACTICE, 4),), seed=3,
    rates=Rates(matrix=0.014, other=0.002), warmup_steps=50,
    # It was ended early, hence the odd bend.
    knots=((0, 1.0), (100, 1.0), (200, 0.87625), (300, 0.5875), (400, 0.01)),
)  # fmt: skip
_THIRD = Plan(
    "target-3", TARGET_GEOMETRY,
    (Phase(COPYING_FROM_FAR, 1), Phase(COPYING, 8), Phase(COPYING_FROM_FAR, 7)), seed=4,
    rates=Rates(matrix=0.016, other=0.0024), warmup_steps=50,
    knots=((0, 1.0), (1000, 1.0), (1600, 0.01)),
)  # fmt: skip
_FOURTH = Plan(
    "target-4", TARGET_GEOMETRY, (Phase(SETTLING, 1),), seed=6, leg_steps=240,
    rates=Rates(matrix=0.007, other=0.001), warmup_steps=10, flat_share=0.1,
)  # fmt: skip
_FIFTH = Plan(
    "target-5", FAR_GEOMETRY, (Phase(REMEMBERING, 3),), seed=8,
    rates=Rates(matrix=0.012, other=0.0017), warmup_steps=20, flat_share=0.4,
)  # fmt: skip
_SIXTH = _gentle_round(6, REMEMBERING, 80, seed=10, after=_FIVE_ROUNDS)
_ELEVENTH = Plan(
    "target-11", FAR_GEOMETRY, (Phase(FINISHING, 1),), seed=17, leg_steps=280,
    rates=Rates(matrix=0.005, other=0.0008), warmup_steps=5, flat_share=0.1,
)  # fmt: skip

FULL = Recipe(
    stages=(
        Stage(_FIRST),
        Stage(Plan("draft", DRAFT_GEOMETRY, (Phase(FIRST_STEPS, 1), Phase(EVERYDAY, 9)))),
        _distillation(1, FAR_BACK, 100, 2, "draft", {"target": 1.0}, 3, warmup_steps=100),
        Stage(_SECOND, {"target": 1.0}),
        Stage(_THIRD, {"target": 1 / 2, "target-2": 1 / 2}),
        # The mean of the rounds is better than each in what each of them is good at: the third
        # alone copies best, and answers worst what is phrased in a new way.
        Stage(_FOURTH, {"target": 1 / 3, "target-2": 1 / 3, "target-3": 1 / 3}),
        _distillation(2, SETTLING, 100, 7, "distillation", _FOUR_ROUNDS),
        Stage(_FIFTH, _FOUR_ROUNDS),
        _SIXTH,
        _distillation(3, REMEMBERING, 60, 9, "distillation-2", {"target-6": 1.0}),
        _long_round(7, LASTING, 12, 11, _SIX_ROUNDS),
        _gentle_round(8, REVISING, 300, 13, _SEVEN_ROUNDS),
        _distillation(4, LASTING, 200, 12, "distillation-3", _EIGHT_ROUNDS),
        _long_round(9, RECALLING, 11, 14, _EIGHT_ROUNDS),
        _gentle_round(10, POLISHING, 350, 15, _NINE_ROUNDS, num_legs=2),
        _distillation(5, POLISHING, 200, 16, "distillation-4", _TEN_ROUNDS),
        Stage(_ELEVENTH, _TEN_ROUNDS),
        _gentle_round(12, REFUSING, 300, 18, _ELEVEN_ROUNDS, num_legs=2),
        _gentle_round(13, REMINDED, 320, 19, _TWELVE_ROUNDS, num_legs=2),
    ),
    shipped={"target": _THIRTEEN_ROUNDS, "draft": {"distillation-5": 1.0}},
    num_tokenizer_chats=20_000,
    num_probes=200,
)
