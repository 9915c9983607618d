"""What rounding weights to 8 or 4 bits does to a model, and which matrices it costs too much.

Before a model's weights are rounded, it reads a short text with them as they are and with rounded
ones, and the predictions are compared. Where 4 bits change too much, kinds of matrices, such as the
values of attention, stay in 8 bits: those that cost the most for their size first. The result is
kept in the memory, so it is measured once.
"""

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from kvchat.core.config import ROUNDING_VARIABLE
from kvchat.core.errors import ModelError
from kvchat.core.types import Fact, Memory
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.checkpoint.text_files import read_text_files
from kvchat.model.device import dtype_name
from kvchat.model.hf.module_adapter import own_attention
from kvchat.model.packed.quantise import (
    kinds_of_layers,
    multiplying_in_float32,
    multiplying_rounded,
    num_elements,
)
from kvchat.model.spec import ModelSpec

_KIND = "rounding"
# Divergences, in nats a token. Below the first nothing is kept in 8 bits; above the second a model
# answers otherwise too often to say nothing.
_GOOD, _BAD = 0.03, 0.1
# Products of a model with the text; a large one reads less of it.
_MOST_PRODUCTS = 2e11
_FEWEST_TOKENS, _MOST_TOKENS = 64, 256
# Of a smaller model nothing is measured: rounding saves less than reading the text costs.
_LEAST_PARAMETERS = 1_000_000
_ROWS = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Effect:
    """What rounding did, in the mean over the tokens of a text.

    divergence   of the predictions from those before (Kullback-Leibler, in nats)
    same         the share of tokens after which the likeliest next token is the same
    in_8         kinds of matrices that have 8 bits in a model of 4
    """

    divergence: float
    same: float
    num_tokens: int
    in_8: tuple[str, ...] = ()

    def sentence(self, weights: str) -> str:
        """Return what rounding did in one sentence."""
        changed = f"{1 - self.same:.0%} of {self.num_tokens} likeliest tokens"
        stay = f"; {', '.join(self.in_8)} have 8 bits" if self.in_8 else ""
        return f"Weights in {weights} change {changed} (KL {self.divergence:.4f}{stay})."


class Reference:
    """The predictions of a model with the weights it has now, to compare others with."""

    def __init__(self, module: Any, token_ids: Sequence[int]) -> None:
        self._ids = torch.tensor([token_ids])
        self._logits = self._predictions(module)

    def effect(self, module: Any, in_8: tuple[str, ...] = ()) -> Effect:
        """Compare the predictions of the same module, whose weights may be others now."""
        logits = self._predictions(module)
        rows = zip(self._logits.split(_ROWS), logits.split(_ROWS), strict=True)
        effect = effect_between(rows, in_8)
        if effect.divergence == math.inf:
            raise ValueError("predictions that are no numbers")
        return effect

    def _predictions(self, module: Any) -> torch.Tensor:
        # In 16 bits the activations differ as much by chance as 8 bits of weights make them.
        embed = module.get_input_embeddings()
        with own_attention(module), multiplying_in_float32(module), torch.inference_mode():
            embedded = embed(self._ids).float()
            logits: torch.Tensor = module(inputs_embeds=embedded, use_cache=False).logits[0]
        return logits


def effect_between(
    rows: Iterable[tuple[torch.Tensor, torch.Tensor]], in_8: tuple[str, ...] = ()
) -> Effect:
    """Return how logits [rows, vocab] differ from those before, given a few rows at a time.

    The divergence is infinite where they are no numbers.
    """
    divergence, same, count = 0.0, 0, 0
    for own, other in rows:
        divergence += float(divergences(own, other).sum())
        same += int((own.argmax(-1) == other.argmax(-1)).sum())
        count += len(own)
    if not math.isfinite(divergence):
        divergence = math.inf
    return Effect(max(0.0, divergence / count), same / count, count, in_8)


def refuse_bad(effect: Effect, name: str, sentence: str, way: str) -> None:
    """Raise ModelError for a model that would answer otherwise too often, unless the user insists
    by `ROUNDING_VARIABLE`. `way` says what to use instead.
    """
    if effect.divergence > _BAD and os.environ.get(ROUNDING_VARIABLE) != "any":
        raise ModelError(
            f"{name} would answer otherwise. {sentence}",
            f"Use {way}, or insist by {ROUNDING_VARIABLE}=any.",
        )


def divergences(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the divergence of `other` from `own` of each row of logits, in nats."""
    log_own, log_other = own.float().log_softmax(-1), other.float().log_softmax(-1)
    return (log_own.exp() * (log_own - log_other)).sum(-1)


def effect_on(
    device: torch.device,
    module: Any,
    spec: ModelSpec,
    source: ModelSource,
    identity: str,
    memory: Memory,
    weights: str,
) -> Effect | None:
    """Return what rounding a model's weights to `weights` does, and what to keep in 8 bits.

    The module is on the CPU with its own weights. None where that cannot be measured: for experts,
    for a tiny model or one without a tokenizer, or where the module does not run by itself; and for
    another device than the CPU, if it was not measured on a CPU before. Raises ModelError if the
    rounded model would answer otherwise too often, unless the user insists.
    """
    effect = known_effect(identity, weights, module.dtype, memory)
    if effect is None and device.type != "cpu":
        return None
    if effect is None:
        try:
            effect = _measured(module, spec, weights, source)
        except Exception as error:  # transformers and tokenizers raise any kind
            _log.info("rounding not measured model=%s: %s", spec.model_type, type(error).__name__)
            return None
        if effect is None:
            return None
        memory.set(_KIND, _key(identity, weights, module.dtype), asdict(effect))
    refuse_bad(effect, source.name, effect.sentence(weights), "more bits")
    return effect


def known_effect(identity: str, weights: str, dtype: torch.dtype, memory: Memory) -> Effect | None:
    """Return what was measured of a checkpoint before; None if nothing was."""
    return effect_of(memory.get(_KIND, _key(identity, weights, dtype)))


def effect_of(fact: Fact) -> Effect | None:
    """Return the effect that a fact of the memory is; None if it is none."""
    try:
        assert isinstance(fact, dict)
        effect = Effect(**{**fact, "in_8": tuple(map(str, fact["in_8"]))})
        is_sound = math.isfinite(effect.divergence) and 0 <= effect.same <= 1
        return effect if is_sound and type(effect.num_tokens) is int else None
    except (AssertionError, LookupError, TypeError, ValueError):
        return None


def _key(identity: str, weights: str, dtype: torch.dtype) -> str:
    facts = (transformers.__version__, identity, weights, dtype_name(dtype))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]


def _measured(module: Any, spec: ModelSpec, weights: str, source: ModelSource) -> Effect | None:
    kinds = kinds_of_layers(module, spec)
    if kinds is None or spec.num_parameters < _LEAST_PARAMETERS:
        return None
    token_ids = sample_ids(source, num_sample_tokens(spec))
    reference = Reference(module, token_ids)
    with multiplying_rounded(module, spec, weights, kinds):
        effect = reference.effect(module)
    if weights == "int8" or effect.divergence <= _GOOD:
        return effect
    costs = {}
    beginning = Reference(module, token_ids[:_FEWEST_TOKENS])  # the order of kinds needs no more
    for kind in kinds:
        with multiplying_rounded(module, spec, weights, [kind]):
            costs[kind] = beginning.effect(module).divergence
    in_8 = _to_keep(costs, {kind: num_elements(layers) for kind, layers in kinds.items()})
    with multiplying_rounded(module, spec, weights, kinds, in_8):
        return reference.effect(module, in_8)


def _to_keep(costs: dict[str, float], sizes: dict[str, int]) -> tuple[str, ...]:
    """Return the kinds to keep in 8 bits, those of the most divergence for their size first.

    Divergences of kinds add up nearly, so enough is kept when the others' sum is small.
    """
    kept: list[str] = []
    for kind in sorted(costs, key=lambda kind: costs[kind] / sizes[kind], reverse=True):
        if sum(cost for other, cost in costs.items() if other not in kept) <= _GOOD:
            break
        kept.append(kind)
    return tuple(kept)


def num_sample_tokens(spec: ModelSpec) -> int:
    """Return how many tokens of the text a model reads."""
    count = int(_MOST_PRODUCTS / max(1, spec.num_parameters))
    return max(_FEWEST_TOKENS, min(_MOST_TOKENS, count))


def sample_ids(source: ModelSource, count: int) -> list[int]:
    """Return the ids of the text, after the token that begins the model's contexts."""
    return new_encoder(source)(_TEXT)[:count]


def new_encoder(source: ModelSource) -> Callable[[str], list[int]]:
    """Return what makes the ids of a text, after the token that begins the model's contexts."""
    files = read_text_files(source)
    tokenizer = files.tokenizer()
    tokenizer.no_truncation()
    bos = tokenizer.token_to_id(files.special_tokens.get("bos_token", ""))

    def encode(text: str) -> list[int]:
        ids = list(tokenizer.encode(text).ids)
        if files.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    return encode


# Prose, a conversation, numbers and code in several languages.
_TEXT = '''\
The old lighthouse keeper climbed the stairs every evening, although his knees had begun to complain
years ago. From the gallery he could see the harbour, the two fishing boats that were left, and the
road along which his daughter would come on Sunday. She worked in the city, in a hospital with four
hundred beds, and she brought newspapers, oranges and questions that he did not like to answer.

User: What is the capital of France, and how many people live there?
Assistant: The capital of France is Paris. About 2.1 million people live in the city itself, and
more than 12 million in the whole region.
User: Write a function that returns the largest number of a list.
Assistant: Here it is:

```python
def largest(numbers):
    """Return the largest number, None for an empty list."""
    result = None
    for number in numbers:
        if result is None or number > result:
            result = number
    return result
```

It reads the list once. For the list [3, 17, 5] it returns 17.

Der Zug nach Hamburg fährt um 14:35 Uhr von Gleis 7 ab und kommt gegen Abend an. La bibliothèque est
fermée le lundi, mais elle ouvre tôt le samedi. Water boils at 100 degrees Celsius at sea level; on
a mountain of 3,000 metres it boils at about 90 degrees, because the pressure is lower there.
'''
