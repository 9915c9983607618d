"""Tasks and headers of CPU kernels, and the compiled attention run alone."""

from typing import Any

import numpy as np
import torch

from kvchat_kernels.coded_kv import CodedKv
from kvchat_kernels.cpu import attention_task
from kvchat_kernels.cpu.attention_kernels import attention_kernel, joining_kernel
from kvchat_kernels.cpu.parts import Parts
from kvchat_kernels.cpu.program import Operation, Program
from kvchat_kernels.cpu.step import NUM_HEADERS, NUM_OF_SEQUENCE, Header
from kvchat_kernels.cpu.task import Task
from kvchat_kernels.paged_attention import AttentionSpan, PagedSequences


def sequences(states: list[torch.Tensor], counts: list[int]) -> Any:
    """Sequences with so many rows each, as the header's SEQUENCES names them; the caller owns."""
    numbers = np.zeros((len(counts), NUM_OF_SEQUENCE), np.int64)
    row = 0
    for numbers_of_one, state, count in zip(numbers, states, counts, strict=True):
        numbers_of_one[:4] = row, count, state.data_ptr(), count
        row += count
    return numbers


def header(num_rows: int, slots: torch.Tensor | None = None) -> Any:
    numbers = np.zeros(NUM_HEADERS, np.int64)
    numbers[Header.NUM_ROWS] = num_rows
    numbers[Header.SLOTS] = 0 if slots is None else slots.data_ptr()
    return numbers


def run_units(operation: Operation, num_units: int, num_threads: int) -> None:
    """Run one operation alone."""
    program = Program([operation])
    program.units[0] = num_units
    program.prepare()
    program.run(num_threads)


def run(
    kernel: Any,
    task: Task,
    num_units: int,
    states: list[torch.Tensor] | None = None,
    counts: list[int] | None = None,
) -> None:
    """Run a kernel; of sequences with `states`, so many rows each, it has `num_units` for each."""
    counts = counts or [1]
    numbers: np.ndarray[Any, Any] = header(sum(counts))
    if states is not None:
        named = sequences(states, counts)
        numbers[Header.SEQUENCES] = named.ctypes.data
        num_units *= len(counts)
    run_units(Operation(kernel, task, numbers, None), num_units, 2)


def of_inputs(inputs: torch.Tensor) -> dict[str, Any]:
    """What a task says of its inputs."""
    return {"inputs": inputs, "stride": inputs.stride(0) * 4, "place": 0}


def in_order(counts: list[int]) -> list[int]:
    """The sequence of each row."""
    return [index for index, count in enumerate(counts) for _ in range(count)]


def attended(
    form: attention_task.AttentionForm,
    span: AttentionSpan,
    sequences: PagedSequences,
    query: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor] | CodedKv,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_threads: int = 1,
) -> torch.Tensor:
    """What the compiled attention makes of `query` [rows, heads * key dim]."""
    out = torch.zeros(len(query), form.num_heads, form.value_dim)
    parts = Parts(span, form.num_heads, form.num_kv_heads, form.value_dim)
    keys, values = (pools.keys, pools.values) if isinstance(pools, CodedKv) else pools
    task = attention_task.AttentionTask(
        record=parts.record,
        query=query,
        query_stride=query.stride(0) * 4,
        keys=keys,
        values=values,
        scale=0.125,
        softcap=softcap,
        sinks=sinks,
        out=out,
        key_scales=pools.key_scales if isinstance(pools, CodedKv) else None,
        value_scales=pools.value_scales if isinstance(pools, CodedKv) else None,
    )
    operations = [
        Operation(kernel, task, header(len(query)), None)
        for kernel in (attention_kernel(form), joining_kernel(form))
    ]
    program = Program(operations)
    program.units[:] = parts.set(sequences) * form.num_kv_heads, len(query)
    program.prepare()
    program.run(num_threads)
    return out
