"""Batched greedy or sampled decoding with a KV cache, for evaluation and distillation.

The plain twin of kvchat's engine: one padded tensor a layer, no paging. Knows the network; knows no
tokenizer and no dialogue.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from demo_recipe.network import Network, feed_forward, merge, project, rotation

BATCH_TOKENS = 24_576  # prompt tokens of one batch, padding included


@dataclass(frozen=True, slots=True)
class Completion:
    """Generated ids, the end token left out; `is_finished` says whether it came."""

    ids: list[int]
    is_finished: bool


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to decode. Temperature 0 is greedy."""

    end_id: int
    max_new_tokens: int = 160
    temperature: float = 0.0
    seed: int = 0


def complete(network: Network, prompts: Sequence[list[int]], how: Decoding) -> list[Completion]:
    """Complete all prompts, in batches of similar length; results in the order given."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    results: dict[int, Completion] = {}
    while order:
        longest = len(prompts[order[-1]])
        count = max(1, min(128, BATCH_TOKENS // longest))
        batch, order = order[-count:], order[:-count]
        completions = _complete_batch(network, [prompts[index] for index in batch], how)
        results.update(zip(batch, completions, strict=True))
    return [results[index] for index in range(len(prompts))]


@torch.inference_mode()
def _complete_batch(network: Network, prompts: list[list[int]], how: Decoding) -> list[Completion]:
    cache = _Cache(network, prompts, how.max_new_tokens)
    noise = torch.Generator().manual_seed(how.seed)
    logits = cache.prefill()
    ids: list[list[int]] = [[] for _ in prompts]
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    for step in range(how.max_new_tokens):
        tokens = _choose(logits, how.temperature, noise)
        is_done |= tokens.cpu() == how.end_id
        if bool(is_done.all()):
            break
        for row, token in enumerate(tokens.tolist()):
            if not is_done[row]:
                ids[row].append(token)
        if step + 1 < how.max_new_tokens:
            logits = cache.step(tokens)
    return [Completion(row, bool(done)) for row, done in zip(ids, is_done, strict=True)]


def _choose(logits: Tensor, temperature: float, noise: torch.Generator) -> Tensor:
    if temperature == 0.0:
        return logits.argmax(-1)
    weights = torch.softmax(logits.float() / temperature, -1).cpu()
    return torch.multinomial(weights, 1, generator=noise).squeeze(1).to(logits.device)


class _Cache:
    """Keys and values of one left-padded batch: all rows end in the same column."""

    def __init__(self, network: Network, prompts: list[list[int]], room: int) -> None:
        weight = network.model.embed_tokens.weight
        self._network, self._dtype, device = network, weight.dtype, weight.device
        self._used = max(len(prompt) for prompt in prompts)
        size = (len(prompts), self._used)
        self._ids = torch.zeros(size, dtype=torch.long)
        self._first = torch.tensor([self._used - len(prompt) for prompt in prompts])
        for row, prompt in enumerate(prompts):
            self._ids[row, self._first[row] :] = torch.tensor(prompt)
        self._ids, self._first = self._ids.to(device), self._first.to(device)
        geometry = network.geometry
        shape = (size[0], geometry.num_key_value_heads, self._used + room, geometry.head_dim)
        self._kv = [(weight.new_empty(shape), weight.new_empty(shape)) for _ in network.layers()]

    def prefill(self) -> Tensor:
        """Read the prompts; logits [num_rows, vocab_size] of their last positions."""
        columns = torch.arange(self._used, device=self._ids.device)
        positions = (columns - self._first[:, None]).clamp(min=0)
        is_real = columns >= self._first[:, None]
        is_causal = columns[:, None] >= columns
        # Padding queries see themselves, so that no row of the softmax is empty.
        mask = (is_causal & is_real[:, None]) | torch.eye(
            self._used, dtype=torch.bool, device=self._ids.device
        )
        return self._forward(self._ids, positions, mask[:, None], 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token a row; logits [num_rows, vocab_size]."""
        positions = (self._used - self._first)[:, None]
        columns = torch.arange(self._used + 1, device=tokens.device)
        mask = (columns >= self._first[:, None])[:, None, None]
        self._used += 1
        return self._forward(tokens[:, None], positions, mask, self._used - 1)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int) -> Tensor:
        network = self._network
        cos, sin = rotation(positions, network.geometry, self._dtype)
        states = network.model.embed_tokens.weight[ids]
        stop = start + ids.shape[1]
        for layer, (keys, values) in zip(network.layers(), self._kv, strict=True):
            query, key, value = project(layer, states, cos, sin)
            keys[:, :, start:stop], values[:, :, start:stop] = key, value
            attended = scaled_dot_product_attention(
                query, keys[:, :, :stop], values[:, :, :stop], mask, enable_gqa=True
            )
            states = states + merge(layer, attended)
            states = states + feed_forward(layer, states)
        return network.logits(states[:, -1])
