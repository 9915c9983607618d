"""Queries, keys and values that are made of latents, in a step's program.

The cache has whole keys and values, as the modules store them.
"""

from typing import Any

import torch

from kvchat.model.cpu.step_operations import Activations, StepOperations, Unfit, check_widths
from kvchat.model.decoder.decoder import Latents
from kvchat.model.decoder.matrices import Norm
from kvchat.model.spec import LayerSpec
from kvchat_kernels.cpu import latents
from kvchat_kernels.cpu.latents import LatentForm, LatentHeadsTask, LatentNormTask


def add_latents(
    operations: StepOperations,
    part: Latents,
    spec: LayerSpec,
    angles: Any,
    source: Activations,
    values: torch.Tensor,
    qkv: torch.Tensor,
) -> None:
    """Write Q, K and V [rows, width] of `values`, rounded into `source`, as `qkv` has them.

    `angles` are the `Angles` of the layer; None: nothing is rotated.
    """
    heads, rank = spec.num_heads, part.up.num_in
    rotated = part.keys.num_out - rank
    plain, width = spec.key_dim - rotated, heads * spec.key_dim
    is_other = spec.num_kv_heads != heads or (angles is not None and rotated != 2 * angles.half)
    if is_other or part.up.num_out != heads * (plain + spec.value_dim):
        raise Unfit("has latents of another form")
    turned = rotated if angles is None else rotated // 2
    check_widths(plain, turned, spec.value_dim, rank)
    query = qkv[:, :width]
    if part.of_query is None:
        operations.products((part.query,), source, values, query)
    else:
        matrix, norm = part.of_query
        latent = operations.output("latents of queries", matrix.num_out)
        operations.products((matrix,), source, values, latent)
        short = _norm(operations, "queries", latent, norm, matrix.num_out)
        operations.products((part.query,), short, short.floats, query)
    both = operations.output("latents of keys", rank + rotated)
    operations.products((part.keys,), source, values, both)
    short = _norm(operations, "keys", both, part.norm, rank)
    expanded = operations.output("expanded latents", part.up.num_out)
    operations.products((part.up,), short, short.floats, expanded)
    task = LatentHeadsTask(
        qkv=qkv,
        qkv_stride=qkv.stride(0) * 4,
        expanded=expanded,
        key=both[:, rank:],
        key_stride=both.stride(0) * 4,
        cosines=None if angles is None else angles.cosines,
        sines=None if angles is None else angles.sines,
    )
    form = LatentForm(
        heads,
        plain,
        rotated,
        spec.value_dim,
        angles is not None,
        part.turns_neighbours,
        part.parts_neighbours,
    )
    operations.add(latents.latent_heads_kernel(form), task, None)


def _norm(
    operations: StepOperations, name: str, x: torch.Tensor, norm: Norm, width: int
) -> Activations:
    """Norm the first `width` columns of x into the inputs of what reads latents."""
    normed = operations.input(f"latents of {name}", width)
    task = LatentNormTask(
        x=x,
        stride=x.stride(0) * 4,
        width=width,
        weight=norm.weight,
        epsilon=norm.epsilon,
        out=normed.floats,
    )
    operations.add(latents.latent_norm_kernel(), task, None)
    return normed
