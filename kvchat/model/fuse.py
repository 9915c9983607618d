"""Swaps forwards of a loaded model for faster ones, instance by instance, each checked first.

A candidate runs beside the module it would replace, on the same random input, and is kept only
where the two agree; everything else goes on as it was. Replacements work during a step of a
PagedModel, for as many rows as the scheme says; otherwise modules run their own code.
"""

import logging
import weakref
from dataclasses import dataclass
from threading import Lock, Thread, current_thread
from typing import Any

import torch
from torch import nn

from kvchat.model.device import free_bytes
from kvchat.model.fuse_search import Comparison, FoundParts, LayerSearch, MakeProduct, find_norm
from kvchat.model.fused_layers import FusedLayer, WholeModel, join_model, with_scripts
from kvchat.model.fused_parts import (
    PACKABLE,
    FusedAttention,
    GatedMlp,
    HalfProduct,
    MergedProduct,
    Product,
    RmsNorm,
    has_half_products,
    most_packed_rows,
)
from kvchat.model.hf_adapter import StepContext, binding_of
from kvchat.model.quantise import DevicePack, DeviceProducts, SharedInputProducts, pack_of
from kvchat.model.spec import LayerSpec, ModelSpec


class Installer:
    """Replaces forwards that work while `context` is inside a step of at most `max_rows` rows.

    Once `keeps_stream` is set, layers hand the residual stream on in `compute_dtype`, which only
    replacements understand: set it where all of a model's layers and what follows them are. Once
    `is_off` is set, every module runs its own code again. `layers` are the decoder layers replaced,
    by their attention modules.
    """

    def __init__(self, context: StepContext, compute_dtype: torch.dtype, max_rows: int) -> None:
        self._context = context
        self._compute_dtype = compute_dtype
        self._max_rows = max_rows
        self.keeps_stream = False
        self.is_off = False
        self.merged: list[MergedProduct] = []
        self.layers: dict[nn.Module, FusedLayer] = {}

    def layer(self, module: Any, attention: nn.Module, fused: FusedLayer) -> None:
        """Replace a decoder layer's forward."""
        own = module.forward
        self.layers[attention] = fused
        self._adopt(fused.attention.qkv, fused.attention.out, fused.mlp.gate_up, fused.mlp.down)

        def forward(
            hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> Any:
            if not (self._applies(hidden_states) and _are_angles(position_embeddings)):
                return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
            self._context.check()
            cos, sin = position_embeddings
            x = hidden_states[0].to(self._compute_dtype)
            out = self.layers[attention](x, cos, sin, binding_of(attention))[None]
            return out if self.keeps_stream else out.to(hidden_states.dtype)

        module.forward = forward

    def attention(self, module: Any, fused: FusedAttention) -> None:
        """Replace an attention's forward."""
        own = module.forward
        self._adopt(fused.qkv, fused.out)

        def forward(
            hidden_states: torch.Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any
        ) -> Any:
            if not (self._applies(hidden_states) and _are_angles(position_embeddings)):
                return own(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
            self._context.check()
            cos, sin = position_embeddings
            x = hidden_states[0].to(self._compute_dtype)
            out = fused(x, cos, sin, binding_of(module))[None]
            return out.to(hidden_states.dtype), None

        module.forward = forward

    def mlp(self, module: Any, fused: GatedMlp) -> None:
        """Replace an MLP's forward."""
        self._adopt(fused.gate_up, fused.down)
        self._rowwise(module, fused, self._compute_dtype)

    def norm(self, module: Any, fused: RmsNorm) -> None:
        """Replace a norm's forward."""
        self._rowwise(module, fused, None)

    def linear(self, module: Any, fused: Product) -> None:
        """Replace a linear layer's forward."""
        self._adopt(fused)
        self._rowwise(module, fused, self._compute_dtype)

    def head(self, module: Any, fused: Product) -> None:
        """Replace the output head's forward; logits keep the precision they are computed in."""
        self._adopt(fused)
        self._rowwise(module, fused, self._compute_dtype, casts_back=False)

    def _adopt(self, *products: Product) -> None:
        for product in products:
            if isinstance(product, MergedProduct):
                product.adopt()
                self.merged.append(product)

    def _rowwise(
        self, module: Any, fused: Any, dtype: torch.dtype | None, casts_back: bool = True
    ) -> None:
        own = module.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not self._applies(x):
                out: torch.Tensor = own(x)
                return out
            out = fused(x if dtype is None else x.to(dtype))
            return out.to(x.dtype) if casts_back else out

        module.forward = forward

    def _applies(self, x: torch.Tensor) -> bool:
        """`x` is [1, num_rows, ...]; a step's rows lie in one sequence."""
        if self.is_off or self._context.batch is None:
            return False
        return x.shape[1] <= self._max_rows


def _are_angles(position_embeddings: Any) -> bool:
    """Whether these are cosines and sines, and not one tensor of complex numbers (Llama 4)."""
    return isinstance(position_embeddings, tuple) and len(position_embeddings) == 2


_log = logging.getLogger(__name__)
_NO_LIMIT = 1 << 30
# Copies of the weights may take this share of what memory is free; KV wants some too.
_MOST_OF_FREE = 0.6
# The forms of weights that leave the checkpoint's own in place.
_OWN, _HALF = "own", "float16"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How products are made, and what fused parts compute in.

    `weights` names the numbers: `own`, `float16` where few rows meet copies in that dtype, or the
    form the weights were packed in.
    """

    weights: str
    make: MakeProduct
    compute_dtype: torch.dtype
    max_rows: int


@dataclass(frozen=True, slots=True)
class Fusion:
    """What of a model runs fused: whole decoder layers, and parts fused on their own."""

    weights: str = _OWN
    num_layers: int = 0
    num_parts: int = 0

    def __str__(self) -> str:
        if not self.num_layers and not self.num_parts:
            return "none: transformers' own forward pass"
        return f"{self.num_layers} layers, {self.num_parts} other parts, {self.weights} weights"


def choose_scheme(module: Any, weights: str = "auto") -> Scheme:
    """Return the scheme for a loaded model's dtype and device; `weights` as in ModelConfig."""
    weight = module.get_input_embeddings().weight
    dtype, device = weight.dtype, weight.device
    if weights != "auto" and any(isinstance(pack_of(x), DevicePack) for x in module.modules()):
        return Scheme(weights, DeviceProducts, dtype, _NO_LIMIT)
    if weights != "auto":
        return Scheme(weights, SharedInputProducts, torch.float32, _NO_LIMIT)
    num_bytes = 2 * sum(parameter.numel() for parameter in module.parameters())
    if (
        device.type == "cpu"
        and dtype in PACKABLE
        and has_half_products()
        and num_bytes < _MOST_OF_FREE * free_bytes(device)
    ):
        return Scheme(_HALF, HalfProduct, dtype, most_packed_rows(dtype))
    return Scheme(_OWN, MergedProduct, dtype, _NO_LIMIT)


class Fusing:
    """A model's fusion under way, or done.

    Copies of weights take seconds to lay out, which need not delay loading and
    prefilling: they are made on threads of their own, and `wait` is called before the first step
    they are for. Replacements run while `context` is inside a step.
    """

    def __init__(self, module: Any, spec: ModelSpec, context: StepContext, scheme: Scheme) -> None:
        self.weights = scheme.weights
        self._is_packed_on_gpu = scheme.make is DeviceProducts
        self._fuser = _Fuser(module, spec, context, scheme)
        self._max_rows = scheme.max_rows
        self._threads: list[Thread] = []
        if scheme.make is not HalfProduct:
            self._fuser.work()
            self._fuser.finish()
        else:
            # As daemons: a process that leaves before they are done has no use for their work.
            # But it must wait for the layer they are at: a thread that returns from torch into an
            # interpreter that is gone aborts the process.
            self._threads = [
                Thread(target=self._fuser.work, name=f"kvchat-fuse-{index}", daemon=True)
                for index in range(torch.get_num_threads())
            ]
            for thread in self._threads:
                thread.start()
            weakref.finalize(self, _give_up, self._fuser, self._threads)

    def wait(self) -> Fusion:
        """Return what was fused, once it is all done."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        return self._fuser.finish()

    def merged_products(self) -> list[MergedProduct]:
        """Return the products in place that run on the model's own weights, once all is done."""
        self.wait()
        return self._fuser.merged_products()

    @property
    def can_abandon(self) -> bool:
        """Whether there is something to abandon, and products of the modules' own to go back to."""
        has_own = self.weights in (_OWN, _HALF) or self._is_packed_on_gpu
        return has_own and not self._fuser.is_off

    def abandon(self) -> None:
        """Let every module run its own code again, where the parts together do not do as it does.

        Each was checked alone; what a whole model hands them may still be something else.
        """
        assert self.can_abandon
        self.wait()
        self._fuser.abandon()
        if self.weights == _HALF:
            self.weights = _OWN

    @property
    def whole(self) -> WholeModel | None:
        """What runs small steps as a whole; None where nothing does, or it is not known yet."""
        return self._fuser.whole

    def before_step(self, num_rows: int) -> None:
        """Wait if replacements are for steps of so many rows: the same step, the same numbers."""
        if self._threads and num_rows <= self._max_rows:
            self.wait()


def _give_up(fuser: "_Fuser", threads: list[Thread]) -> None:
    """Leave undone what no caller waits for any more, at exit at the latest."""
    fuser.drop_work()
    for thread in threads:
        if thread is not current_thread():
            thread.join()


class _Fuser:
    """Checks and installs replacements, on any number of threads at once."""

    def __init__(self, module: Any, spec: ModelSpec, context: StepContext, scheme: Scheme) -> None:
        self._module = module
        self._spec = spec
        self._scheme = scheme
        self._installer = Installer(context, scheme.compute_dtype, scheme.max_rows)
        self._agreed: dict[tuple[str, ...], bool] = {}
        self._lock = Lock()
        # Taken from the end: the head, which is the largest, comes first.
        self._to_do: list[LayerSpec | None] = [*reversed(spec.layers), None]
        self._num_left = len(self._to_do)
        self._num_layers = 0
        self._num_parts = 0
        self._head: Product | None = None
        self._fusion: Fusion | None = None
        self._whole: WholeModel | None = None

    def work(self) -> None:
        """Do what is left to do, until nothing is; the thread that does the last of it finishes."""
        while True:
            with self._lock:
                if not self._to_do:
                    return
                layer = self._to_do.pop()
            try:
                if layer is None:
                    self._fuse_head()
                else:
                    self._install(layer, self._search(layer))
            except Exception as error:
                # A model's own code may raise anything when it is run; nothing is lost but speed,
                # for the module goes on running that code.
                _log.warning("not fused: %s", error)
            with self._lock:
                self._num_left -= 1
                is_last = self._num_left == 0
            if is_last:
                self._finish_early()

    def _finish_early(self) -> None:
        """Finish before a caller waits for it; a failure is logged, and raised to that caller."""
        try:
            self.finish()
        except Exception as error:
            _log.warning("not finished before it is waited for: %s", error)

    def drop_work(self) -> None:
        """Let `work` return as soon as it is done with what it is at."""
        with self._lock:
            self._to_do.clear()

    def finish(self) -> Fusion:
        """Fuse the parts that require all other parts to be fused; return those fused."""
        if self._fusion is None:
            self._script_layers()
            is_whole = self._num_layers == len(self._spec.layers) and self._head is not None
            norm = self._install_final_norm()
            self._installer.keeps_stream = norm is not None and is_whole
            if norm is not None and is_whole:
                self._whole = self._join(norm)
            self._fusion = Fusion(self._scheme.weights, self._num_layers, self._num_parts)
            _log.info("fused model=%s: %s", self._spec.model_type, self._fusion)
        return self._fusion

    @torch.inference_mode()
    def _script_layers(self) -> None:
        """Let layers run as scripts, where these do to the bit what the layers do."""
        specs = [self._module.get_submodule(layer.module_name) for layer in self._spec.layers]
        found = [
            (layer, attention, self._installer.layers[attention])
            for layer, attention in zip(self._spec.layers, specs, strict=True)
            if attention in self._installer.layers
        ]
        scripted = with_scripts([fused for _, _, fused in found])
        comparison = Comparison(self._scheme.compute_dtype, self._module.device)
        for (layer, attention, fused), other in zip(found, scripted, strict=True):
            if other.script is not None and comparison.is_identical(
                layer, fused, other, fused.before_attention.width
            ):
                self._installer.layers[attention] = other

    @property
    def whole(self) -> WholeModel | None:
        return self._whole

    @property
    def is_off(self) -> bool:
        return self._installer.is_off

    def merged_products(self) -> list[MergedProduct]:
        return [] if self.is_off else list(self._installer.merged)

    def abandon(self) -> None:
        """Switch all replacements off."""
        self._installer.is_off = True
        self._whole = None
        self._fusion = Fusion()

    @torch.inference_mode()
    def _search(self, layer: LayerSpec) -> FoundParts | None:
        parent, attention_name = self._parent(layer)
        scheme = self._scheme
        search = LayerSearch(parent, attention_name, layer, scheme.make, scheme.compute_dtype)
        try:
            found = search.run()
        except ValueError as error:
            _log.info("%s runs its own code: %s", layer.module_name, error)
            return None
        if self._is_low_precision:
            kind = (*(type(module).__name__ for module in parent.modules()), *found.recipe)
            if kind not in self._agreed:
                self._agreed[kind] = search.agrees_in_float32(found)
            if not self._agreed[kind]:
                _log.info("%s runs its own code: float32 does not agree", layer.module_name)
                return None
        return found

    @property
    def _is_low_precision(self) -> bool:
        return bool(self._module.dtype != torch.float32)

    def _parent(self, layer: LayerSpec) -> tuple[Any, str]:
        """Return the module that holds a layer's attention, and the attention's name in it."""
        parent_name, _, attention_name = layer.module_name.rpartition(".")
        return self._module.get_submodule(parent_name), attention_name

    def _install(self, layer: LayerSpec, found: FoundParts | None) -> None:
        if found is None:
            return
        with self._lock:
            self._install_parts(layer, found)

    def _install_parts(self, layer: LayerSpec, found: FoundParts) -> None:
        parent, attention_name = self._parent(layer)
        attention = parent.get_submodule(attention_name)
        if found.layer is not None:
            self._installer.layer(parent, attention, found.layer)
            self._num_layers += 1
            return
        for name, norm in found.norms.items():
            self._installer.norm(parent.get_submodule(name), norm)
        if found.attention is not None:
            self._installer.attention(attention, found.attention)
        if found.mlp is not None:
            self._installer.mlp(parent.mlp, found.mlp)
        for name, product in found.linears.items():
            self._installer.linear(parent.get_submodule(name), product)
        self._num_parts += found.num_parts

    @torch.inference_mode()
    def _fuse_head(self) -> None:
        """Replace the output head by a product, where it is a linear layer."""
        head = self._module.get_output_embeddings()
        if type(head) is not nn.Linear:
            return
        try:
            is_half = self._scheme.make is HalfProduct
            product = HalfProduct([head], True) if is_half else self._scheme.make([head])
        except ValueError as error:
            _log.info("the head runs its own code: %s", error)
            return
        comparison = Comparison(head.weight.dtype, head.weight.device)
        dtype = self._scheme.compute_dtype
        if comparison.same(head, lambda x: product(x.to(dtype)), head.in_features):
            with self._lock:
                self._installer.head(head, product)
                self._num_parts += 1
                self._head = product

    @torch.inference_mode()
    def _install_final_norm(self) -> RmsNorm | None:
        """Replace the norm that follows the last layer, where it is found beside the layers."""
        norm = getattr(self._owner_of_layers(), "norm", None)
        comparison = Comparison(self._module.dtype, self._module.device)
        found = find_norm(norm, comparison, self._scheme.compute_dtype)
        if found is None:
            return None
        self._installer.norm(norm, found[1])
        self._num_parts += 1
        return found[1]

    def _owner_of_layers(self) -> nn.Module | None:
        """Return the module that has the list of layers."""
        first, _ = self._parent(self._spec.layers[0])
        for name, module in self._module.named_modules():
            if any(child is first for child in module.children()):
                owner, _, _ = name.rpartition(".")
                found: nn.Module = self._module.get_submodule(owner)
                return found
        return None

    @torch.inference_mode()
    def _join(self, norm: RmsNorm) -> WholeModel | None:
        """Return all fused parts as one, where the layers are scripts."""
        assert self._head is not None
        parts = (self._module, self._owner_of_layers(), self._spec, self._installer.layers)
        try:
            limits = self._scheme.compute_dtype, self._scheme.max_rows
            return join_model(*parts, norm, self._head, *limits)
        except Exception as error:
            # As above: what a model's own code raises costs nothing but speed.
            _log.info("not run as a whole: %s", error)
            return None
