"""Prompts of gated delta nets on a CPU: the rule in compiled kernels instead of transformers' own.

transformers computes it in chunks, by a dozen operators of torch over float32 copies, which take
most of a prompt's time. Here a module keeps its linear layers, whichever form their weights have,
and what lies between them runs in three kernels (`kvchat_kernels.cpu.delta_rows`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kvchat.model.state import bound_state
from kvchat.model.step_delta import DeltaNet
from kvchat.model.step_operations import StepOperations, Task
from kvchat_kernels.cpu import delta_rows
from kvchat_kernels.cpu.code import LANES
from kvchat_kernels.cpu.delta_rows import Place, RowsForm
from kvchat_kernels.cpu.program import Program
from kvchat_kernels.cpu.step import Header


class DeltaPrefill:
    """Stands for the forward of a module with a gated delta net.

    Steps of several rows over a cache object that `takes_kernels` are computed here, and all others
    by the module's own forward.
    """

    def __init__(self, module: Any, net: DeltaNet) -> None:
        self._module = module
        self._own = module.forward
        self._net = net
        self._form = RowsForm(net.form, len(net.convolution.weights))

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cache_params: Any = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        is_plain = attention_mask is None and hidden_states.shape[:1] == (1,)
        num_rows = hidden_states.shape[1]
        if not (is_plain and num_rows > 1 and getattr(cache_params, "takes_kernels", False)):
            own: torch.Tensor = self._own(
                hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs
            )
            return own
        mixed, gates, betas, steps = self._inputs(hidden_states)
        conv, state, has_past = bound_state(cache_params, self._net.layer)
        if not has_past:
            conv.zero_()
            state.zero_()
        num_past = self._form.num_taps - 1
        x = torch.cat((conv[0, :, -num_past:].T.float(), mixed))
        conv[0].copy_(torch.cat((conv[0, :, :1].T.float(), x))[-self._form.num_taps :].T)
        read = self._rule(x, gates, betas, steps, state)
        out: torch.Tensor = self._module.out_proj(read.to(hidden_states.dtype)[None])
        return out

    def _inputs(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return Q K V, gates, betas and steps, each [rows, width] float32."""
        module, form = self._module, self._net.form
        if self._net.order is None:
            names = ("qkv", "z", "b", "a")
            parts = [getattr(module, f"in_proj_{name}")(hidden_states) for name in names]
            return tuple(part[0].float() for part in parts)
        outputs = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
        ordered = torch.cat([part[0].float() for part in outputs], dim=1)[:, self._net.order]
        width = form.num_heads * form.value_dim
        sizes = (self._form.num_channels, width, form.num_heads, form.num_heads)
        return tuple(part.contiguous() for part in ordered.split(sizes, dim=1))

    def _rule(
        self,
        x: torch.Tensor,
        gates: torch.Tensor,
        betas: torch.Tensor,
        steps: torch.Tensor,
        state: torch.Tensor,
    ) -> torch.Tensor:
        """Return what is read of the state, normed and gated, [rows, width] float32."""
        net, form = self._net, self._form
        num_rows = len(gates)
        out = torch.empty_like(gates)
        mixed = torch.empty(num_rows, form.num_channels, dtype=torch.float32)
        task: Task = {
            Place.X: x,
            Place.WEIGHTS: net.convolution.weights,
            Place.MIXED: mixed,
            Place.STEPS: steps,
            Place.BETAS: betas,
            Place.STEP_BIAS: net.step_bias,
            Place.RATES: net.rates,
            Place.STATE: state,
            Place.GATES: gates,
            Place.NORM: net.norm.weight,
            Place.EPSILON: net.norm.epsilon,
            Place.OUT: out,
        }
        operations = StepOperations()
        operations.header[Header.NUM_ROWS] = num_rows
        operations.add(delta_rows.inputs_kernel(form), task, num_rows)
        operations.add(delta_rows.steps_kernel(form), task, form.num_units)
        operations.add(delta_rows.outputs_kernel(form), task, num_rows)
        program = Program(operations.all)
        program.prepare()
        program.run(torch.get_num_threads())
        return out


def takes_rows(net: DeltaNet) -> bool:
    """Return whether the kernels take a net: of whole vectors, and as its step is computed."""
    form, convolution = net.form, net.convolution
    is_whole = form.key_dim % LANES == form.value_dim % LANES == 0
    channels = RowsForm(form, len(convolution.weights)).num_channels
    return (
        is_whole
        and convolution.is_activated
        and convolution.bias is None
        and convolution.num_channels == channels
    )


def replace_rules(module: nn.Module, nets: Sequence[DeltaNet]) -> None:
    """Let the prompts of a model's nets be computed here, where a cache object `takes_kernels`."""
    by_layer: dict[Any, DeltaNet] = {net.layer: net for net in nets if takes_rows(net)}
    for part in module.modules() if by_layer else ():
        net = by_layer.get(getattr(part, "layer_idx", None)) if hasattr(part, "A_log") else None
        if net is not None:
            part.forward = DeltaPrefill(part, net)
