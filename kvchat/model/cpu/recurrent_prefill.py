"""Prompts of gated delta nets, Mamba-2 and RWKV on a CPU: the recurrence in compiled kernels.

transformers computes it in chunks, by dozens of operators of torch over float32 copies, which take
most of a prompt's time. Here a module keeps its linear layers, whichever form their weights have,
and what lies between them runs in three kernels (`kvchat_kernels.cpu.delta_rows`, `mamba_rows`), of
RWKV in the one of its steps. RWKV's it computes row by row.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from kvchat.model.cpu.step_operations import StepOperations
from kvchat.model.decoder.matrices import Matrix
from kvchat.model.decoder.recurrent import DeltaNet, Mamba, TimeMixing
from kvchat.model.state import bound_state
from kvchat_kernels.cpu import delta_rows, mamba_rows, rwkv
from kvchat_kernels.cpu.code import LANES, Kernel, OfTask
from kvchat_kernels.cpu.program import Program
from kvchat_kernels.cpu.step import Header, OfSequence, set_num_rows
from kvchat_kernels.cpu.task import Numbers


class RecurrentPrefill:
    """Stands for the forward of a module with a recurrence.

    Steps of several rows over a cache object that `takes_kernels` are computed here, and all others
    by the module's own forward.
    """

    def __init__(self, module: Any, part: "DeltaNet | Mamba") -> None:
        self._module = module
        self._own = module.forward
        self._layer = part.layer
        self._out: Any = part.out.source

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
        mixed, *others = self._inputs(hidden_states)
        conv, state, has_past = bound_state(cache_params, self._layer)
        if not has_past:
            conv.zero_()
            state.zero_()
        x = self._with_past(mixed, conv[0])
        read = self._rule(x, others, state, num_rows)
        out: torch.Tensor = self._out(read.to(hidden_states.dtype)[None])
        return out

    def _with_past(self, mixed: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the convolution behind the past ones; `conv` gets the last.

        mixed    [rows, channels]
        conv     [channels, taps], the last inputs
        """
        num_channels, num_taps = conv.shape
        x = torch.empty(num_taps + len(mixed), num_channels, dtype=torch.float32)
        x[:num_taps] = conv.T
        x[num_taps:] = mixed
        conv.copy_(x[-num_taps:].T)
        return x[1:]

    @abstractmethod
    def _inputs(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the convolution's inputs [rows, channels], and what else `_rule` needs.

        The rest is contiguous, [rows, width] float32. Each copy of a prompt's numbers takes as long
        as a kernel, so the inputs stay as they are.
        """

    @abstractmethod
    def _rule(
        self, x: torch.Tensor, others: Sequence[torch.Tensor], state: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        """Return what is read of the state, normed and gated, [rows, width] float32.

        `x` are the convolution's inputs, the past ones first; `state` is changed.
        """


class DeltaPrefill(RecurrentPrefill):
    """The prompts of a gated delta net."""

    def __init__(self, module: Any, net: DeltaNet) -> None:
        super().__init__(module, net)
        self._net = net
        self._form = delta_rows.RowsForm(net.form, len(net.convolution.weights))

    def _inputs(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        net, form = self._net, self._net.form
        linears: list[Any] = [each.source for each in net.inputs if isinstance(each, Matrix)]
        outputs = [linear(hidden_states)[0] for linear in linears]
        if net.order is None:
            *parts, gates, betas, steps = outputs
            mixed = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            others = [gates, betas, steps]
        else:
            ordered = torch.cat(outputs, dim=1)[:, net.order]
            width = form.num_heads * form.value_dim
            sizes = (self._form.num_channels, width, form.num_heads, form.num_heads)
            mixed, *others = ordered.split(sizes, dim=1)
        return mixed, *(part.float().contiguous() for part in others)

    def _rule(
        self, x: torch.Tensor, others: Sequence[torch.Tensor], state: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        net, form = self._net, self._form
        gates, betas, steps = others
        out = torch.empty_like(gates)
        task = delta_rows.DeltaRowsTask(
            x=x,
            weights=net.convolution.weights,
            mixed=torch.empty(num_rows, form.num_channels, dtype=torch.float32),
            steps=steps,
            betas=betas,
            step_bias=net.step_bias,
            rates=net.rates,
            state=state,
            gates=gates,
            norm=net.norm.weight,
            epsilon=net.norm.epsilon,
            out=out,
        )
        kernels = [
            (delta_rows.inputs_kernel(form), num_rows),
            (delta_rows.steps_kernel(form), form.num_units),
            (delta_rows.outputs_kernel(form), num_rows),
        ]
        _run(kernels, task, num_rows)
        return out


class MambaPrefill(RecurrentPrefill):
    """The prompts of a Mamba-2 layer."""

    def __init__(self, module: Any, mamba: Mamba) -> None:
        super().__init__(module, mamba)
        self._mamba = mamba
        convolution = mamba.convolution
        has_bias = convolution.bias is not None
        self._form = mamba_rows.RowsForm(mamba.form, len(convolution.weights), has_bias)

    def _inputs(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        module, form = self._module, self._mamba.form
        if hasattr(module, "mup_vector"):  # Falcon-H1's scale what goes in and what comes out
            outputs = module.in_proj(hidden_states * module.ssm_in_multiplier) * module.mup_vector
        else:
            outputs = module.in_proj(hidden_states)
        sizes = (form.num_heads * form.head_dim, self._form.num_channels, form.num_heads)
        gates, mixed, steps = outputs[0].split(sizes, dim=1)
        return mixed, gates.float().contiguous(), steps.float().contiguous()

    def _rule(
        self, x: torch.Tensor, others: Sequence[torch.Tensor], state: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        mamba, form, norm = self._mamba, self._form, self._mamba.norm
        gates, steps = others
        out = torch.empty_like(gates)
        task = mamba_rows.MambaRowsTask(
            x=x,
            weights=mamba.convolution.weights,
            bias=mamba.convolution.bias,
            mixed=torch.empty(num_rows, form.num_channels, dtype=torch.float32),
            steps=steps,
            decays=torch.empty_like(steps),
            step_bias=mamba.step_bias,
            rates=mamba.rates,
            skips=mamba.skips,
            state=state,
            gates=gates,
            norm=None if norm is None else norm.weight,
            epsilon=0.0 if norm is None else norm.epsilon,
            out=out,
            least=mamba.limits[0],
            most=mamba.limits[1],
        )
        kernels = [
            (mamba_rows.inputs_kernel(form), num_rows),
            (mamba_rows.steps_kernel(form), form.num_units),
        ]
        if norm is not None:
            kernels.append((mamba_rows.norms_kernel(form), num_rows))
        _run(kernels, task, num_rows)
        return out


class TimeMixingPrefill:
    """Stands for the forward of RWKV's time mixing, as RecurrentPrefill does for others."""

    def __init__(self, module: Any, mixing: TimeMixing) -> None:
        self._module = module
        self._own = module.forward
        self._mixing = mixing
        self._layer = mixing.layer

    def __call__(
        self, hidden: torch.Tensor, state: Any = None, use_cache: bool = False
    ) -> tuple[torch.Tensor, Any]:
        is_prompt = hidden.shape[0] == 1 < hidden.shape[1]
        if not (is_prompt and getattr(state, "takes_kernels", False)):
            own: tuple[torch.Tensor, Any] = self._own(hidden, state=state, use_cache=use_cache)
            return own
        receptance, key, value, state = self._module.extract_key_value(hidden, state=state)
        averages = state[2][0, :, self._layer]  # the three of a layer lie one behind another
        read = self._rule(torch.cat((key, value), dim=-1)[0], averages, hidden.shape[1])
        return self._module.output(receptance * read.to(hidden.dtype)), state

    def _rule(self, inputs: torch.Tensor, state: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return what rows of keys and values read, [rows, channels]; `state` is where S begins."""
        mixing, inputs, num_channels = self._mixing, inputs.float(), len(state)
        out = torch.empty(num_rows, num_channels, dtype=torch.float32)
        task = rwkv.AverageTask(
            inputs=inputs,
            stride=inputs.stride(0) * 4,
            place=0,
            rates=mixing.rates,
            bonuses=mixing.bonuses,
            out=out,
            state=0,
        )
        sequence = np.zeros(len(OfSequence), np.int64)
        for place in (OfSequence.COUNT, OfSequence.NUM_SURE):
            sequence[place] = num_rows
        sequence[OfSequence.STATE] = state.data_ptr()
        kernel = rwkv.average_kernel(num_channels, is_gated=False)
        _run([(kernel, rwkv.num_units(num_channels))], task, num_rows, sequence)
        return out


def _run(
    kernels: Sequence[tuple[Kernel[OfTask], int]],
    task: OfTask,
    num_rows: int,
    sequence: Numbers | None = None,
) -> None:
    """Run kernels of one task one after another, each with its number of units."""
    operations = StepOperations()
    set_num_rows(operations.header, num_rows)
    if sequence is not None:
        operations.header[Header.SEQUENCES] = sequence.ctypes.data
    for kernel, num_units in kernels:
        operations.add(kernel, task, num_units)
    program = Program(operations.all)
    program.prepare()
    program.run(torch.get_num_threads())


def replace_recurrences(module: nn.Module, parts: Iterable[object]) -> None:
    """Let prompts of a model's layers be computed here, where a cache object `takes_kernels`.

    `parts` are its layers as the decoder has them; kinds that have no kernels stay as they are.
    """
    kinds = (DeltaNet, Mamba, TimeMixing)
    by_layer: dict[Any, DeltaNet | Mamba | TimeMixing] = {
        part.layer: part for part in parts if isinstance(part, kinds) and _takes(part)
    }
    for each in module.modules() if by_layer else ():
        # A layer's other parts know its number as well.
        name = "layer_idx" if hasattr(each, "A_log") else "layer_id"
        is_mixer = hasattr(each, "A_log") or hasattr(each, "time_decay")
        part = by_layer.get(getattr(each, name, None)) if is_mixer else None
        if isinstance(part, DeltaNet):
            each.forward = DeltaPrefill(each, part)
        elif isinstance(part, Mamba):
            each.forward = MambaPrefill(each, part)
        elif part is not None:
            each.forward = TimeMixingPrefill(each, part)


def _takes(part: DeltaNet | Mamba | TimeMixing) -> bool:
    """Return whether the kernels take a layer: of whole vectors, and as its step is computed."""
    if isinstance(part, TimeMixing):
        return not part.keys.num_out % LANES
    convolution = part.convolution
    if isinstance(part, DeltaNet):
        widths = part.form.key_dim, part.form.value_dim
        channels = delta_rows.RowsForm(part.form, 0).num_channels
        is_known = convolution.bias is None and not part.form.decays_channels
    else:
        widths = part.form.head_dim, part.form.state_size
        channels = mamba_rows.RowsForm(part.form, 0, has_bias=False).num_channels
        is_known = True
    is_whole = not any(width % LANES for width in widths)
    is_known = is_known and convolution.is_activated
    return is_whole and is_known and convolution.num_channels == channels
