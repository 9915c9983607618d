"""Lays sequences out in pools of NaN: what a kernel reads beside its own tokens shows at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from kvchat_kernels.paged_attention import PagedSequences, Sequences
from support.plain_attention import AttentionCase


@dataclass(frozen=True)
class PagedProblem:
    """Sequences with their KV in pools, and the same KV sequence by sequence for an oracle.

    `positions` are those of the oracle's keys, where tables are private.
    """

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    sequences: Sequences
    sinks: torch.Tensor | None
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    positions: tuple[list[int], ...] | None = None

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_pool, self.value_pool

    def rows(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split a [num_tokens, ...] tensor by sequence."""
        assert isinstance(self.sequences, PagedSequences)
        return tensor.split(list(self.sequences.query_lens))

    def to(self, device: str) -> "PagedProblem":
        """Return the problem with what kernels read on `device`; the oracle's KV stays."""
        if self.query.device.type == device:
            return self
        tensors = {
            field.name: value.to(device)
            for field in fields(self.sequences)
            if isinstance(value := getattr(self.sequences, field.name), torch.Tensor)
        }
        return replace(
            self,
            query=self.query.to(device),
            key_pool=self.key_pool.to(device),
            value_pool=self.value_pool.to(device),
            sequences=replace(self.sequences, **tensors),
            sinks=None if self.sinks is None else self.sinks.to(device),
        )


def paged_problem(
    case: AttentionCase,
    lengths: Sequence[tuple[int, int]],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "permuted",
    seed: int = 0,
) -> PagedProblem:
    """Return random sequences of (new tokens, context length) in pools otherwise full of NaN.

    layout   permuted (blocks anywhere), consecutive (one run each), descending,
             broken (three runs each, where there are so many blocks)
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-context // block_size) for _, context in lengths]
    tables = _tables(counts, layout, generator)
    num_blocks = 2 + sum(counts)
    key_pool = torch.full(
        (num_blocks, block_size, case.num_kv_heads, case.key_dim), float("nan"), dtype=dtype
    )
    value_pool = torch.full(
        (num_blocks, block_size, case.num_kv_heads, case.value_dim), float("nan"), dtype=dtype
    )
    keys, values = [], []
    for (_, context), table in zip(lengths, tables, strict=True):
        keys.append(random(context, case.num_kv_heads, case.key_dim))
        values.append(random(context, case.num_kv_heads, case.value_dim))
        for position in range(context):
            block, offset = table[position // block_size], position % block_size
            key_pool[block, offset] = keys[-1][position]
            value_pool[block, offset] = values[-1][position]
    width = max(counts) + 1  # one unused column, as a step with longer neighbours has
    block_tables = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
    return PagedProblem(
        query=random(sum(new for new, _ in lengths), case.num_heads, case.key_dim),
        key_pool=key_pool,
        value_pool=value_pool,
        sequences=PagedSequences(
            tuple(new for new, _ in lengths),
            tuple(context for _, context in lengths),
            block_tables,
            block_size,
        ),
        sinks=random(case.num_heads) if case.has_sinks else None,
        keys=tuple(keys),
        values=tuple(values),
    )


def with_private_tables(problem: PagedProblem, seed: int = 1) -> PagedProblem:
    """Return a problem whose tables have holes, full of NaN, and positions that jump.

    Every second sequence begins at a position of its own. The first has the table of a shared one.
    The new tokens are one after another, at the end.
    """
    given = problem.sequences
    assert isinstance(given, PagedSequences)
    generator = torch.Generator().manual_seed(seed)
    pools = problem.key_pool.clone(), problem.value_pool.clone()
    shape = len(problem.keys), max(given.context_lens) + 3
    positions, filled_of = torch.full(shape, -1, dtype=torch.int32), []
    for index, (new, end) in enumerate(zip(given.query_lens, given.context_lens, strict=True)):
        chance = torch.rand(2, end, generator=generator)
        steps = 1 + 40 * (chance[0] < 0.1).int()
        is_empty = chance[1] < 0.2
        is_empty[given.block_size : 2 * given.block_size] = True  # a whole block
        steps[end - new + 1 :], is_empty[end - new :] = 1, False
        if index == 0:
            steps[:], is_empty[:] = 1, False
        steps[0] = 77 if index % 2 else 0
        positions[index, :end] = steps.cumsum(0).masked_fill(is_empty, -1)
        for slot in is_empty.nonzero().flatten().tolist():
            block = int(given.block_tables[index, slot // given.block_size])
            for pool in pools:
                pool[block, slot % given.block_size] = float("nan")
        filled_of.append(~is_empty)
    own = [row[row >= 0].tolist() for row in positions]
    return replace(
        problem,
        key_pool=pools[0],
        value_pool=pools[1],
        sequences=replace(given, positions=positions),
        keys=tuple(key[filled] for key, filled in zip(problem.keys, filled_of, strict=True)),
        values=tuple(
            value[filled] for value, filled in zip(problem.values, filled_of, strict=True)
        ),
        positions=tuple(own),
    )


def _tables(counts: list[int], layout: str, generator: torch.Generator) -> list[list[int]]:
    ids = list(range(1, 1 + sum(counts)))
    if layout == "permuted":
        ids = [ids[i] for i in torch.randperm(len(ids), generator=generator).tolist()]
    elif layout == "descending":
        ids = ids[::-1]
    tables = []
    for count in counts:
        tables.append(_broken(ids[:count]) if layout == "broken" else ids[:count])
        ids = ids[count:]
    return tables


def _broken(ids: list[int]) -> list[int]:
    third = len(ids) // 3
    return ids[third : 2 * third] + ids[:third] + ids[2 * third :]
