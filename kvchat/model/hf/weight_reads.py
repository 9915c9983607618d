"""Which linear layers have weights that other code than their own forward reads.

Mamba's mixer multiplies with the weight of its `dt_proj` itself. Such a layer must keep its weight:
only a layer that is called can multiply with another form of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# What a packed layer's empty weight answers as the whole one does.
_GETTERS: tuple[Any, ...] = (
    torch.Tensor.dtype,
    torch.Tensor.device,
    torch.Tensor.requires_grad,
)
_HARMLESS = frozenset(getter.__get__ for getter in _GETTERS)


@contextmanager
def watching_reads(module: nn.Module) -> Iterator[set[str]]:
    """Yield a set that gets the name of each linear layer whose weight the block reads elsewhere.

    Weights that several layers share count for each by itself: what one layer reads is not read
    from another.
    """
    layers = {layer: name for name, layer in module.named_modules() if type(layer) is nn.Linear}
    found: set[str] = set()
    watch = _Watch(found)
    shared = [(layer, layer.weight) for layer in layers]
    hooks = []
    try:
        for layer in layers:
            # Another object on the same memory, so that it is known through which layer it is read.
            layer.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
            watch.names[id(layer.weight)] = (layers[layer], layer)
            hooks.append(layer.register_forward_pre_hook(watch.enter))
            hooks.append(layer.register_forward_hook(watch.leave))
        with watch:
            yield found
    finally:
        for hook in hooks:
            hook.remove()
        for layer, weight in shared:
            layer.weight = weight


def divide_weights(module: Any) -> None:
    """Let RWKV divide some of its weights by powers of two in place, as its first step would.

    It divides its stream, for float16, and so what is added to it. After that it reads no weights.
    """
    divide = getattr(module.base_model, "_rescale_layers", None)
    if divide is not None:
        divide()


class _Watch(TorchFunctionMode):
    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.names: dict[int, tuple[str, nn.Linear]] = {}
        self._found = found
        self._running: list[nn.Module] = []

    def enter(self, layer: nn.Module, *_: Any) -> None:
        self._running.append(layer)

    def leave(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _HARMLESS:
            for value in (*args, *kwargs.values()):
                name, layer = self.names.get(id(value), ("", None))
                if layer is not None and layer not in self._running:
                    self._found.add(name)
        return function(*args, **kwargs)
