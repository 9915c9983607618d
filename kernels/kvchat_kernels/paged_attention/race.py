"""Compares another attention kernel with the reference, and sets it beside ours to be timed.

On a layer's own sizes, over blocks that lie out of order. Slots that no sequence has hold NaN: ours
never read these, and blocks that were used before may hold anything there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvchat_kernels.paged_attention.adopted import LayerRule, StepKind
from kvchat_kernels.paged_attention.reference import paged_attention_reference
from kvchat_kernels.paged_attention.sequences import AttentionFunction, PagedSequences, Scoring

# (new tokens, context) of the comparison: first tokens, a partial last block, several blocks.
_CHECKED = {
    StepKind.DECODE: ((1, 1), (1, 17), (1, 130), (1, 700)),
    StepKind.PREFILL: ((33, 70), (1, 17), (20, 20), (64, 700)),
}
# The same of one timed call: a decode in a long chat, and a chunk of a long prompt.
_TIMED = {StepKind.DECODE: (1, 4096), StepKind.PREFILL: (1024, 2048)}
# A pass of decodes reads about as much KV, more than any GPU's cache; a prefill reads little.
_PASS_BYTES = {StepKind.DECODE: 256 << 20, StepKind.PREFILL: 0}
_MAX_CALLS = 16
_SOFTCAP = 30.0
_TOLERANCE = 16


@dataclass(frozen=True, slots=True)
class Scene:
    """Queries and pools of a layer, and steps over them: one set of sequences a step."""

    rule: LayerRule
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    queries: tuple[torch.Tensor, ...]
    steps: tuple[PagedSequences, ...]

    def attend(self, function: AttentionFunction, step: int) -> torch.Tensor:
        """Return what `function` computes of a step."""
        softcap = _SOFTCAP if self.rule.has_softcap else None
        scoring = Scoring(self.rule.shape.key_dim**-0.5, self.rule.span, softcap)
        pools = self.key_pool, self.value_pool
        return function(self.queries[step], *pools, self.steps[step], scoring)


def difference(
    function: AttentionFunction,
    step: StepKind,
    rule: LayerRule,
    block_size: int,
    device: torch.device,
) -> str | None:
    """Return how `function` differs from the reference, as a sentence's end; None if it agrees.

    Raises what it raises.
    """
    scene = checked_scene(step, rule, block_size, device)
    expected = scene.attend(paged_attention_reference, 0)
    for found in (scene.attend(function, 0), scene.attend(function, 0)):  # twice: it may keep state
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return "its output has another shape"
        tolerance = _TOLERANCE * torch.finfo(found.dtype).eps * float(expected.abs().max())
        off = (found.float() - expected.float()).abs()
        if not bool((off <= tolerance).all()):  # NaN agrees with nothing
            return f"it differs by up to {float(off.max()):.3g}"
    return None


def checked_scene(step: StepKind, rule: LayerRule, block_size: int, device: torch.device) -> Scene:
    """Return one step of several sequences, one of them longer than the layer's window."""
    lengths = list(_CHECKED[step])
    window = rule.span.window or 0
    if window >= lengths[-1][1]:
        lengths[-1] = (lengths[-1][0], window + 3)
    return _scene(rule, [lengths], block_size, device)


def timed_passes(
    rivals: Sequence[AttentionFunction],
    step: StepKind,
    rule: LayerRule,
    block_size: int,
    device: torch.device,
) -> tuple[list[Callable[[], torch.Tensor]], int]:
    """Return a pass for each of `rivals`, over the same steps, and the calls of a pass."""
    query_len, context_len = _TIMED[step]
    shape = rule.shape
    token_bytes = shape.num_kv_heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
    num_steps = max(1, min(_MAX_CALLS, -(-_PASS_BYTES[step] // (token_bytes * context_len))))
    scene = _scene(rule, [[(query_len, context_len)]] * num_steps, block_size, device)
    return [partial(_pass, scene, rival) for rival in rivals], num_steps


def _pass(scene: Scene, function: AttentionFunction) -> torch.Tensor:
    for step in range(len(scene.steps)):
        out = scene.attend(function, step)
    return out


def _scene(
    rule: LayerRule,
    steps: Sequence[Sequence[tuple[int, int]]],
    block_size: int,
    device: torch.device,
) -> Scene:
    generator = torch.Generator(device).manual_seed(0)
    shape = rule.shape

    def random(*sizes: int) -> torch.Tensor:
        numbers = torch.randn(sizes, generator=generator, device=device, dtype=torch.float32)
        return numbers.to(shape.dtype)

    needed = [-(-context // block_size) for lengths in steps for _, context in lengths]
    num_blocks = 1 + sum(needed)
    order = (torch.randperm(num_blocks - 1, generator=generator, device=device) + 1).int()
    own = iter(order.split(needed))
    key_pool = random(num_blocks, block_size, shape.num_kv_heads, shape.key_dim)
    value_pool = random(num_blocks, block_size, shape.num_kv_heads, shape.value_dim)
    key_pool[0] = value_pool[0] = float("nan")
    made = []
    for lengths in steps:
        width = max(-(-context // block_size) for _, context in lengths)
        tables = torch.zeros(len(lengths), width, dtype=torch.int32, device=device)
        for row, (_, context) in enumerate(lengths):
            blocks = next(own)
            tables[row, : len(blocks)] = blocks
            first_unused = context % block_size or block_size
            key_pool[blocks[-1], first_unused:] = float("nan")
            value_pool[blocks[-1], first_unused:] = float("nan")
        counts, contexts = zip(*lengths, strict=True)
        made.append(PagedSequences(counts, contexts, tables, block_size))
    queries = tuple(
        random(sequences.num_tokens, shape.num_heads, shape.key_dim) for sequences in made
    )
    return Scene(rule, key_pool, value_pool, queries, tuple(made))
