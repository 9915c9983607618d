"""The two ways to build the demo pair: the shipped one, and a smoke test of two minutes.

Every number that decides the weights is here. Knows no file and no time.
"""

from dataclasses import dataclass, replace

from kvchat.demo.conversation import Shape
from kvchat.demo.network import Geometry
from kvchat.demo.optimiser import Rates
from kvchat.demo.probes import MAKERS
from kvchat.demo.stream import Mix
from kvchat.demo.train import Phase, Plan

VOCAB_SIZE = 2048
CONTEXT = 4096

SHORT = Shape(mean_turns=2, max_turns=6, drill_rate=0.25)
USUAL = Shape(mean_turns=4.5, max_turns=16)
EXTENDED = Shape(characters=2800)  # about 900 tokens
LONG = Shape(characters=6000)  # about 1,900 tokens
LONGEST = Shape(characters=12_000)  # about 3,800 tokens

FIRST_STEPS = Mix(((SHORT, 1.0),), jump_rate=0.3)
EVERYDAY = Mix(((USUAL, 1.0),), jump_rate=0.3)
FAR_BACK = Mix(((USUAL, 0.92), (EXTENDED, 0.05), (LONG, 0.02), (LONGEST, 0.01)), jump_rate=0.4)

TARGET_GEOMETRY = Geometry(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
)
# One layer: on a CPU a draft costs by the layer, hardly by the width.
DRAFT_GEOMETRY = Geometry(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=896,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All plans of one build.

    num_tokenizer_chats  chats that train the tokenizer
    num_probes           evaluation dialogues per test and grade
    tests                which tests; all of them unless named
    """

    target: Plan
    draft: Plan
    distillation: Plan
    num_tokenizer_chats: int
    num_probes: int
    tests: tuple[str, ...] = tuple(MAKERS)


FULL = Recipe(
    target=Plan(
        "target",
        TARGET_GEOMETRY,
        (Phase(FIRST_STEPS, 3), Phase(EVERYDAY, 22), Phase(FAR_BACK, 11)),
    ),
    draft=Plan(
        "draft",
        DRAFT_GEOMETRY,
        (Phase(FIRST_STEPS, 1), Phase(EVERYDAY, 9)),
        rates=Rates(matrix=0.02),
    ),
    distillation=Plan(
        "distillation",
        DRAFT_GEOMETRY,
        (Phase(FAR_BACK, 3),),
        seed=2,
        rates=Rates(matrix=0.005, other=0.001),
        flat_share=0.0,
    ),
    num_tokenizer_chats=20_000,
    num_probes=100,
)

_TINY = replace(
    TARGET_GEOMETRY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
)
_TINY_DRAFT = replace(_TINY, num_hidden_layers=1)
_BRISK = {"batch_tokens": 4096, "leg_steps": 20, "warmup_steps": 10}
QUICK = Recipe(
    target=Plan("target", _TINY, (Phase(FIRST_STEPS, 4),), **_BRISK),  # type: ignore[arg-type]
    draft=Plan("draft", _TINY_DRAFT, (Phase(FIRST_STEPS, 2),), **_BRISK),  # type: ignore[arg-type]
    distillation=Plan(
        "distillation",
        _TINY_DRAFT,
        (Phase(FIRST_STEPS, 1),),
        seed=2,
        **_BRISK,  # type: ignore[arg-type]
    ),
    num_tokenizer_chats=2_000,
    num_probes=4,
    tests=("recall after 1 turn", "kvchat", "out of scope"),
)
