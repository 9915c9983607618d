"""A step in its static tensors launches the same kernels with the same arguments, at any length.

That is all a captured graph can do: repeat launches. Here Triton interprets them, so that what they
compute at other lengths than those they were first made at can be compared as well.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import kvchat_kernels.kv_write
import kvchat_kernels.paged_attention
import kvchat_kernels.row_operations
from kvchat_kernels.launch import Launch
from kvchat_kernels.paged_attention import Implementation
from support.graph_recorder import Recorder
from support.paged_scene import Scene, load_tiny

Log = list[tuple[Any, ...]]
_WRAPPERS = (kvchat_kernels.kv_write, kvchat_kernels.row_operations)


def take_kernels_everywhere(
    patch: pytest.MonkeyPatch, log: Log, static: list[torch.Tensor]
) -> None:
    """Have this process run every operation by its kernel, and write each launch down."""
    for wrapper in _WRAPPERS:
        patch.setattr(wrapper, "uses_triton", lambda device, impl: True)
    choice = "implementation_for", lambda *layer: Implementation("triton")
    patch.setattr(kvchat_kernels.paged_attention, *choice)
    run = Launch.run

    def logged(launch: Launch) -> None:
        values = tuple((name, _seen(value, static)) for name, value in launch.values.items())
        log.append((launch.kernel.fn.__name__, launch.grid, launch.num_warps, values))
        run(launch)

    patch.setattr(Launch, "run", logged)


def _seen(value: object, static: list[torch.Tensor]) -> object:
    """Return a value as a graph keeps it: numbers, and the places of tensors that stay."""
    if not isinstance(value, torch.Tensor):
        return value
    stays = any(
        tensor.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        for tensor in static
    )
    place = value.data_ptr() if stays else "the step's own"
    return tuple(value.shape), value.stride(), value.dtype, place


def launches_at(name: str, directory: Path, num_new: int, contexts: list[int]) -> list[Log]:
    """Return the launches of a replay at each context, and hold each replay to an eager step."""
    log: Log = []
    static: list[torch.Tensor] = []
    loaded = load_tiny(name, directory)
    with pytest.MonkeyPatch.context() as patch:
        take_kernels_everywhere(patch, log, static)
        scene = Scene(loaded, Recorder(), block_size=16, num_blocks=40)
        buffers = scene.graphs._buffers
        static += [buffers._tokens, buffers._lengths, buffers._tables.blocks, buffers._rows]
        static += scene.tensors() + list(loaded.module.parameters())
        scene.capture_for([scene.piece_over_anything(0, range(num_new))])
        logs = []
        for context in contexts:
            piece = scene.piece_over_anything(context, range(2, 2 + num_new))
            expected = scene.eager([piece])
            log.clear()
            logits = scene.graphs.run([piece])
            assert logits is not None, scene.graphs.status()
            assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
            logs.append(list(log))
    return logs


LONG = [pytest.param("mistral, window", 3, [1, 63, 257], marks=pytest.mark.soak)]


@pytest.mark.matrix  # interpreting two whole steps takes seconds
@pytest.mark.parametrize(("name", "num_new", "contexts"), [("qwen3", 2, [0, 255]), *LONG])
def test_launches_do_not_depend_on_lengths(name, num_new, contexts, interpreter, tmp_path):
    first, *others = interpreter(launches_at, name, tmp_path, num_new, contexts)

    kernels = {launch[0] for launch in first}
    assert {"paged_attention_split_kernel", "merge_splits_kernel"} <= kernels
    assert kernels & {"rope_kv_write_kernel", "kv_write_kernel"}
    assert others
    for launches in others:
        assert launches == first
