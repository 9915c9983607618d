"""The state of recurrent layers: what of transformers' cache object it is, and a step with it.

Layers with recurrence or a short convolution (Mamba, gated delta nets, LFM2's convolutions) keep
tensors of constant size instead of keys and values. transformers holds them in its cache object.
Here that object holds nothing else: keys and values pass through it to the paged attention. Its
tensors are views of a StateBuffer, which the cache saves and restores as bytes.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from kvchat.model.spec import StateTensor
from kvchat_kernels.state_buffer import StateBuffer

# Views of other dtypes need aligned offsets, and kernels prefer whole cache lines.
_ALIGNMENT = 64
CONV, RECURRENT, _LINEAR, OWN = "conv", "recurrent", "linear", "own"
# What RWKV starts its running maximum with.
_LEAST = -1e30


class _PassingThrough(DynamicCache):
    """Keys and values are returned as they come: paged attention stores them.

    `num_tokens` is the length of the context before the step. Where it `takes_kernels`, modules may
    change its tensors by kernels of ours (`model/cpu/recurrent_prefill.py`).
    """

    num_tokens = 0
    takes_kernels = False

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.num_tokens + query_length, 0


class _PassingThroughMiniMax(MiniMaxCache):
    """The same for MiniMax, which accepts only its own class."""

    num_tokens = 0
    update = _PassingThrough.update
    get_seq_length = _PassingThrough.get_seq_length
    get_mask_sizes = _PassingThrough.get_mask_sizes


class _RwkvState(list[torch.Tensor]):
    """RWKV's five tensors [1, hidden_size, num_layers], which its forward writes to in place.

    They are views of three, in which the numbers of each layer lie together:

    newest rows   [1, num_layers, hidden_size], of channel mixing, and another of time mixing
    averages      [1, num_layers, 3, channels], the last a maximum over the tokens seen

    Before a step binds them they have no memory.
    """

    num_tokens = 0
    layers: tuple[Any, ...] = ()

    def __init__(self, config: Any) -> None:
        super().__init__([torch.empty(0)] * 5)
        num_layers, hidden = config.num_hidden_layers, config.hidden_size
        channels = config.attention_hidden_size or hidden
        self._own = (
            torch.empty(1, num_layers, hidden, dtype=torch.bfloat16, device="meta"),
            torch.empty(1, num_layers, hidden, dtype=torch.bfloat16, device="meta"),
            torch.empty(1, num_layers, 3, channels, dtype=torch.float32, device="meta"),
        )
        for index, value in enumerate(self._own):
            self.bind(0, index, value, has_past=True)

    def tensors(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield each tensor with the layer and the number it is bound under."""
        yield from ((0, index, value) for index, value in enumerate(self._own))

    def bind(self, layer: int, index: int, view: torch.Tensor, has_past: bool) -> None:
        """Let the model write to a tensor; one without a past gets its first value."""
        parts = (view,) if view.shape == self._own[0].shape else view.unbind(2)
        self[index : index + len(parts)] = [part.transpose(1, 2) for part in parts]
        if not has_past:
            view.zero_()
            if len(parts) > 1:
                parts[-1].fill_(_LEAST)


class _XlstmState:
    """xLSTM's three tensors of each layer, which its forward writes to in place."""

    num_tokens = 0
    layers: tuple[Any, ...] = ()

    def __init__(self, config: Any) -> None:
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        held = xLSTMCache(config, 1, torch.bfloat16, "meta")
        self.rnn_state = {layer: list(tensors) for layer, tensors in held.rnn_state.items()}
        self.rnn_state_initial = True
        self.seqlen_offset = 0

    def tensors(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield each tensor with its layer and its number there."""
        for layer, tensors in self.rnn_state.items():
            yield from ((layer, index, value) for index, value in enumerate(tensors))

    def bind(self, layer: int, index: int, view: torch.Tensor, has_past: bool) -> None:
        """Let the model write to a tensor; one without a past is zero."""
        if not has_past:
            view.zero_()
        self.rnn_state[layer][index] = view


# Types whose forward takes no cache of transformers' usual class.
_OWN_STATES: dict[str, Callable[[Any], Any]] = {
    "rwkv": _RwkvState,
    "xlstm": _XlstmState,
    "minimax": lambda config: _PassingThroughMiniMax(),
}


def new_state_cache(config: Any) -> Any:
    """Return an empty cache object for a model of `config`; raises what transformers raises."""
    own = _OWN_STATES.get(config.get_text_config().model_type)
    return own(config) if own is not None else _PassingThrough(config=config)


def cache_argument(module: Any) -> str | None:
    """Return the name of the forward's argument that takes a cache object; None without one."""
    parameters = inspect.signature(module.forward).parameters
    names = ("past_key_values", "cache_params", "state")
    return next((name for name in names if name in parameters), None)


def read_state(cache: Any, own_dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """Return the state tensors that a cache object holds after a step.

    A tensor in `own_dtype`, the dtype of the step, has the model's dtype, whichever that is later.
    """
    return tuple(
        StateTensor(
            layer,
            kind,
            index,
            tuple(value.shape),
            None if value.dtype == own_dtype else value.dtype,
        )
        for layer, kind, index, value in _held(cache)
    )


def _held(cache: Any) -> Iterator[tuple[int, str, int, torch.Tensor]]:
    own_tensors = getattr(cache, "tensors", None)
    if own_tensors is not None:
        yield from ((layer, OWN, index, value) for layer, index, value in own_tensors())
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind, states in (
                (CONV, layer.conv_states),
                (RECURRENT, layer.recurrent_states),
            ):
                yield from ((number, kind, i, t) for i, t in states.items() if t is not None)
    for number, value in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(value, torch.Tensor):
            yield number, _LINEAR, 0, value


def bound_state(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return the convolution's and the recurrence's tensors of a layer, and if they have a past.

    They are those of the sequence that runs, bound by `StateIo.running`, and may be written to.
    """
    held = cache.layers[layer]
    return held.conv_states[0], held.recurrent_states[0], held.has_previous_state[0]


class StateIo:
    """Runs the steps of one model with the state of one sequence at a time.

    `tensors` are the model's state tensors. One thread uses it.
    """

    def __init__(
        self,
        module: Any,
        tensors: tuple[StateTensor, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        name = cache_argument(module)
        assert name is not None
        self.argument = name
        self.num_bytes = state_bytes(tensors, dtype)
        self._tensors = tensors
        self._dtype = dtype
        self._device = device
        self._cache: Any = new_state_cache(module.config)

    def new_buffer(self) -> StateBuffer:
        """Return the state of the empty context."""
        return StateBuffer(torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device))

    @contextmanager
    def running(self, state: StateBuffer, takes_kernels: bool = False) -> Iterator[Any]:
        """Yield the cache object to hand to the forward; afterwards `state` has its new value.

        The caller then sets `state.num_tokens`. If the step raises, the value is undefined.
        """
        if not state.views:
            state.views = self._views(state.data)
        state.read_all()
        cache = self._cache
        cache.num_tokens = state.num_tokens
        cache.takes_kernels = takes_kernels
        for tensor, view in zip(self._tensors, state.views, strict=True):
            self._bind(tensor, view, has_past=state.num_tokens > 0)
        yield cache
        for tensor, view in zip(self._tensors, state.views, strict=True):
            if tensor.kind == OWN:  # written in place
                continue
            value = self._value(tensor)
            if value.data_ptr() != view.data_ptr():  # some layers replace their tensor
                view.copy_(value)

    def _views(self, data: torch.Tensor) -> tuple[torch.Tensor, ...]:
        views = []
        offsets = state_offsets(self._tensors, self._dtype)
        for tensor, offset in zip(self._tensors, offsets, strict=True):
            end = offset + tensor.num_bytes(self._dtype)
            part = data[offset:end].view(tensor.dtype or self._dtype)
            views.append(part.view(tensor.shape))
        return tuple(views)

    def _bind(self, tensor: StateTensor, view: torch.Tensor, has_past: bool) -> None:
        if tensor.kind == OWN:
            self._cache.bind(tensor.layer, tensor.index, view, has_past)
            return
        if tensor.kind == _LINEAR:
            if has_past:
                self._cache.set_linear_cache(tensor.layer, view)
            elif tensor.layer < len(self._cache.linear_cache):
                self._cache.linear_cache[tensor.layer] = None
            return
        layer = self._cache.layers[tensor.layer]
        layer.device, layer.dtype = view.device, view.dtype
        layer.has_previous_state[tensor.index] = has_past
        if tensor.kind == CONV:
            layer.conv_states[tensor.index] = view
            layer.conv_kernel_size[tensor.index] = view.shape[-1]
            layer.is_conv_states_initialized[tensor.index] = True
        else:
            layer.recurrent_states[tensor.index] = view
            layer.is_recurrent_states_initialized[tensor.index] = True

    def _value(self, tensor: StateTensor) -> torch.Tensor:
        value: torch.Tensor
        if tensor.kind == _LINEAR:
            value = self._cache.linear_cache[tensor.layer]
        else:
            layer = self._cache.layers[tensor.layer]
            states = layer.conv_states if tensor.kind == CONV else layer.recurrent_states
            value = states[tensor.index]
        return value


def state_bytes(tensors: tuple[StateTensor, ...], dtype: torch.dtype) -> int:
    """Return the size in bytes of a StateBuffer of a model computing in `dtype`."""
    return sum(_aligned(tensor.num_bytes(dtype)) for tensor in tensors)


def state_offsets(tensors: tuple[StateTensor, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return where each tensor begins in the bytes of a StateBuffer."""
    sizes = [_aligned(tensor.num_bytes(dtype)) for tensor in tensors]
    return tuple(accumulate(sizes[:-1], initial=0)) if sizes else ()


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
