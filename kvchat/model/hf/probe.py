"""The probe finds out whether an architecture can be paged, and the facts about each layer.

It runs nine tokens through the model's own code without weights (on torch's meta device) and
records every attention call. It reads a layer's span by evaluating transformers' mask function, a
function of (batch, head, query position, key position): some models state their window nowhere
else. Reads no checkpoint.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvchat.core.errors import ModelUnsupported, in_one_line
from kvchat.model.hf.config_limits import ParameterLimit, TooLarge
from kvchat.model.hf.gathered import cache_over, spans_of
from kvchat.model.hf.model_class import MetaModel, operators_on_meta
from kvchat.model.hf.module_adapter import OWN_ATTENTION, find_sinks, replace_own_attention
from kvchat.model.hf.weight_reads import divide_weights, watching_reads
from kvchat.model.spec import CacheCall, Gathered, LayerSpec, ModelSpec, StateTensor
from kvchat.model.state import cache_argument, new_state_cache, read_state
from kvchat_kernels.paged_attention import FULL, AttentionSpan

_log = logging.getLogger(__name__)

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Far enough apart that any plausible window or chunk size changes the mask at one of them.
_QUERY_POSITIONS = (0, 1, 5, 63, 1_000, 4_095, 65_537, 1_048_575, 4_194_303)


class UnknownMask(Exception):
    """The mask is neither causal, windowed nor chunked."""


def read_span(mask_function: MaskFunction) -> AttentionSpan:
    """Return the span that `mask_function` describes: full, windowed or chunked.

    Raises UnknownMask for any other mask.
    """
    sees = _evaluator(mask_function)
    last = _QUERY_POSITIONS[-1]
    first = _first_visible(sees, last)
    candidates = [
        FULL,
        AttentionSpan(window=last - first + 1),
        AttentionSpan(chunk=_chunk_size(sees, first)),
    ]
    for candidate in candidates:
        if all(_agrees(sees, candidate, query) for query in _QUERY_POSITIONS):
            return candidate
    raise UnknownMask


def _evaluator(mask_function: MaskFunction) -> Callable[[int, int], bool]:
    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    return sees


def _first_visible(sees: Callable[[int, int], bool], query: int) -> int:
    """Return the lowest visible key of a query, by bisection.

    The visible keys must be one contiguous range that ends at the query.
    """
    if not sees(query, query):
        raise UnknownMask
    low, high = 0, query
    while low < high:
        middle = (low + high) // 2
        if sees(query, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _chunk_size(sees: Callable[[int, int], bool], first: int) -> int:
    """Return the number of queries that see key `first`, by bisection: a chunk's size."""
    low, high = first, first + _QUERY_POSITIONS[-1]
    while low < high:
        middle = (low + high + 1) // 2
        if sees(middle, first):
            low = middle
        else:
            high = middle - 1
    return low - first + 1


def _agrees(sees: Callable[[int, int], bool], span: AttentionSpan, query: int) -> bool:
    first = span.first_visible(query)
    middle = (first + query) // 2
    inside = {first, min(first + 1, query), middle, (middle + query) // 2, max(query - 1, first)}
    before = {0, 1, first // 2, first - 2, first - 1}
    outside = {query + 1, query + 7, *(key for key in before if 0 <= key < first)}
    return all(sees(query, key) for key in inside) and not any(sees(query, key) for key in outside)


PROBE = "kvchat_probe"
_RECORDER = "_kvchat_recorder"
_NUM_TOKENS = 9
_KNOWN_TENSORS = frozenset({"s_aux", "position_ids", "cache_position", "logits_to_keep"})
_DEFAULT_CONTEXT = 4096
_NO_INTERFACE = "does not use transformers' attention interface"
# Types that add an offset to positions, and types that count them from their cache's length.
_WITH_OFFSET = {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm"} | {
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
_COUNTING = {"bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart"}
_OWN_POSITIONS = frozenset(_WITH_OFFSET | _COUNTING)
# Arguments that the forward passes of models ask for when text is not enough.
_OTHER_INPUTS = (
    *("pixel_values", "image", "flattened_patches", "Bbox", "audio", "input_features"),
    *("encoder_outputs", "inputs_embeds", "required positional argument"),
)
# A word of the reason -> what runs instead.
_INSTEAD = {
    "both directions": "Models that read from left to right run instead, such as Llama or Qwen.",
    "not a causal": "Models that write text run instead, such as Llama or Qwen.",
    "beside text": "Models that also read text alone run instead, such as Qwen3-VL or Gemma 3.",
    "state": "Other recurrent models run instead, such as Qwen3.5, Mamba 2, Falcon-H1 or RWKV.",
    "index of its own": "DeepSeek V3.2 runs instead, whose index is known.",
    "configuration": "Another checkpoint of this model may run.",
}
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True)
class MaskDescriptor:
    """Takes the place of a mask tensor and holds the mask function."""

    mask_function: Any


@dataclass(slots=True)
class _Recorder:
    """Records the attention calls of one forward pass."""

    own_span: Any = None
    layers: list[LayerSpec] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    names: dict[nn.Module, str] = field(default_factory=dict)
    spans: dict[int, AttentionSpan] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Record one call; return an uninitialised output of the right shape."""
        _refuse_strange_calls(module, key, kwargs)
        if isinstance(scaling, complex):  # the square root of a negative setting
            raise NotReal("scales its attention by a number that is not real")
        if module in self.modules:
            raise Refusal("runs attention more than once per layer")
        shares = [index for index, earlier in enumerate(self.keys) if earlier is key]
        if not shares:
            self.keys.append(key)
        self.modules.append(module)
        self.layers.append(
            LayerSpec(
                module_name=self.names[module],
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                span=self._span(module, attention_mask, kwargs),
                has_softcap=kwargs.get("softcap") is not None,
                has_sinks=find_sinks(module, kwargs) is not None,
                pool_index=shares[0] if shares else len(self.keys) - 1,
                stores_kv=not shares,
            )
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _span(self, module: nn.Module, mask: object, kwargs: dict[str, Any]) -> AttentionSpan:
        if self.own_span is not None:
            span: AttentionSpan = self.own_span(module)
            return span
        if mask is None:
            span = FULL
        elif isinstance(mask, MaskDescriptor):
            # Evaluating a mask is slow, and layers of one type share a mask.
            if id(mask) not in self.spans:
                self.spans[id(mask)] = read_span(mask.mask_function)
            span = self.spans[id(mask)]
        else:
            raise Refusal("changes the attention mask itself")
        window = kwargs.get("sliding_window")
        if window is not None and span.window is None:
            # The mask is per layer type, the argument per layer: use the narrower one.
            span = AttentionSpan(window=int(window), chunk=span.chunk)
        return span


class Refusal(Exception):
    """An architecture cannot be paged; the message completes "it ..."."""


class NotCausal(Refusal):
    """No path can serve the architecture: its keys and values depend on later tokens."""


class NotReal(Refusal):
    """No path can serve the checkpoint: its configuration makes no real numbers."""


class ProbeInconclusive(Exception):
    """The model does not run without weights; use `probe_loaded` on the loaded model."""


def _refuse_strange_calls(module: nn.Module, key: torch.Tensor, kwargs: dict[str, Any]) -> None:
    if key.shape[2] != _NUM_TOKENS:
        raise Refusal("attends to something other than the tokens of its own step")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise NotCausal("attends in both directions")
    for name, argument in kwargs.items():
        if isinstance(argument, torch.Tensor) and name not in _KNOWN_TENSORS:
            raise Refusal(f"passes {name}, which a paged cache does not know, to its attention")


def probe(config: Any, limit: ParameterLimit | None = None) -> ModelSpec:
    """Return the spec of a transformers config's model, without its weights; see `probe_meta`."""
    return probe_meta(MetaModel(config), limit)


def probe_meta(model: MetaModel, limit: ParameterLimit | None = None) -> ModelSpec:
    """Return the spec of a model without weights, which is built for it.

    Raises TooLarge if the model exceeds `limit`; ModelUnsupported, with the architecture and the
    reason, if its KV cannot be paged; ProbeInconclusive if its code needs real values.
    """
    with _refusing(model.config):
        try:
            return _paged(model, limit)
        except (NotCausal, NotReal):
            raise
        except Refusal as refusal:
            return _gathered(_build(model, limit, "eager"), model.config, refusal)


def attention_to_probe_loaded(config: Any) -> str:
    """Return the attention to load a model with for `probe_loaded`: PROBE or `eager`."""
    try:
        _paged(MetaModel(config), None)
    except Refusal:
        return "eager"
    except ProbeInconclusive:
        pass
    return PROBE


def _paged(model: MetaModel, limit: ParameterLimit | None) -> ModelSpec:
    """Return the spec for paged attention; raises Refusal where that cannot serve."""
    _refuse_layer_types(model.config)
    _refuse_own_positions(model.config)
    return _record(_build(model, limit), model.config)


def probe_loaded(model: Any) -> ModelSpec:
    """Return the spec of a model loaded with the attention of `attention_to_probe_loaded`.

    Raises ModelUnsupported if its KV cannot be paged. A model on the gathered path has the
    attention `eager` afterwards.
    """
    with _refusing(model.config):
        try:
            if model.config._attn_implementation != PROBE:
                # Raises why it was not loaded with PROBE.
                return _paged(MetaModel(model.config), None)
            return _record(model, model.config)
        except (NotCausal, NotReal):
            raise
        except (Refusal, ProbeInconclusive) as error:
            refusal = error if isinstance(error, Refusal) else _failed(error)
            model.set_attn_implementation("eager")
            try:
                return _gathered(model, model.config, refusal)
            except ProbeInconclusive as second:
                raise refusal from second


def _failed(error: Exception) -> Refusal:
    """Return the refusal of a model whose own code fails; what it raised goes to the log."""
    _log.info("the first forward pass failed: %s", error)
    if any(name in str(error) for name in _OTHER_INPUTS):
        return Refusal("needs inputs beside text")
    return Refusal("fails in transformers' own code where it is given text alone")


def _instead(reason: str) -> str:
    """Return what to run in place of an architecture that is refused for a reason."""
    named = next((hint for word, hint in _INSTEAD.items() if word in reason), None)
    return named or "A decoder with plain attention runs instead, such as Llama, Qwen or Gemma."


def register_probe() -> None:
    """Register the probe with transformers under the name PROBE. May be called again."""
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _describe_mask)


@contextmanager
def _refusing(config: Any) -> Iterator[None]:
    """Turn a Refusal into a ModelUnsupported for the user."""
    try:
        yield
    except Refusal as refusal:
        raise ModelUnsupported(
            f"The architecture {_name(config)} is not supported: it {refusal}.",
            f"{_instead(str(refusal))} docs/models.md lists every type that kvchat runs.",
        ) from refusal


def _name(config: Any) -> str:
    architectures = getattr(config, "architectures", None)
    names = architectures if isinstance(architectures, list) else []
    name = (names and names[0]) or type(config).__name__
    return f"{name} ({config.model_type})"


def _refuse_layer_types(config: Any) -> None:
    for layer_type in _strange_layer_types(config):
        if any(word in layer_type for word in ("sparse", "indexed", "compressed")):
            raise Refusal(f"chooses its keys by an index of its own in {layer_type} layers")


def _strange_layer_types(config: Any) -> list[str]:
    """Return the types of layers that are not known as attention: they may keep state."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    return [str(name) for name in layer_types if str(name) not in _ATTENTION_LAYERS]


def _refuse_own_positions(config: Any) -> None:
    """Refuse what counts positions from the length of its cache, or with an offset of its own.

    Such a model may use those positions only far into a context (Llama 4's temperature tuning),
    where the short self-test would not notice.
    """
    text_config = config.get_text_config()
    if text_config.model_type == "llama4_text" and text_config.attn_temperature_tuning:
        raise Refusal("tunes its attention by positions it counts itself")
    if text_config.model_type in _OWN_POSITIONS:
        raise Refusal("counts positions itself")


def _record(model: Any, config: Any) -> ModelSpec:
    """Run the forward pass and make a spec of the recorded calls and of the recurrent state."""
    own = OWN_ATTENTION.get(config.model_type)
    recorder = _Recorder(own.span if own is not None else None)
    for path, module in model.named_modules():
        recorder.names[module] = path
        module.__dict__[_RECORDER] = recorder
    is_stateful = getattr(type(model), "_is_stateful", False)
    if not is_stateful and not _strange_layer_types(config):
        # With a mask, transformers skips its search for packed sequences, which needs real values.
        mask = torch.ones(1, _NUM_TOKENS, dtype=torch.long, device=model.device)
        _run(model, attention_mask=mask, use_cache=False)
        return _spec(recorder, model, config)
    argument = cache_argument(model)
    if argument is None:
        raise Refusal("keeps recurrent state in a form of its own")
    cache = new_state_cache(model.config)
    divide_weights(model)
    # With a cache it does not search, and recurrent layers would read the mask's values.
    with watching_reads(model) as reads:
        _run(model, **{argument: cache}, use_cache=True)
    state = read_state(cache, model.dtype)
    if not state and is_stateful and not _strange_layer_types(config):
        return _spec(recorder, model, config)  # all layers of this configuration are attention
    if not state:
        strange = (*_strange_layer_types(config), "recurrent")
        raise Refusal(f"keeps state other than keys and values in its {strange[0]} layers")
    spec = _model_spec(model, config, recorder.layers, state=state)
    return replace(spec, read_elsewhere=tuple(sorted(reads)))


def _run(model: Any, **settings: Any) -> None:
    token_ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=model.device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # As every step does: without it, some models drop rows before attention.
        settings["logits_to_keep"] = torch.arange(_NUM_TOKENS, device=model.device)
    try:
        with torch.inference_mode(), operators_on_meta():
            model(input_ids=token_ids, **settings)
    except UnknownMask as error:
        raise Refusal(
            "uses an attention mask that is neither causal, windowed nor chunked"
        ) from error
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # A model that uses the MaskDescriptor as a tensor, or needs real values, fails with an
        # error type that differs between classes.
        if MaskDescriptor.__name__ in str(error):
            raise Refusal("computes with the attention mask itself") from error
        raise ProbeInconclusive(in_one_line(error)) from error


def _spec(recorder: _Recorder, model: Any, config: Any) -> ModelSpec:
    text_config = config.get_text_config()
    if not recorder.layers:
        raise Refusal(_NO_INTERFACE)
    num_layers = getattr(text_config, "num_hidden_layers", None)
    if num_layers is None:
        raise Refusal("does not say how many layers its text model has")
    if len(recorder.layers) != num_layers:
        raise Refusal(f"runs attention {len(recorder.layers)} times in {num_layers} layers")
    return _model_spec(model, config, recorder.layers)


def _model_spec(
    model: Any,
    config: Any,
    layers: Sequence[LayerSpec],
    gathered: Gathered | None = None,
    state: tuple[StateTensor, ...] = (),
) -> ModelSpec:
    text_config = config.get_text_config()
    length = getattr(text_config, "max_position_embeddings", None) or 0
    return ModelSpec(
        architecture=_name(config).split()[0],
        model_type=config.model_type,
        layers=tuple(layers),
        vocab_size=text_config.vocab_size,
        max_context=length if length > 0 else _DEFAULT_CONTEXT,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        gathered=gathered,
        state=state,
    )


@dataclass(slots=True)
class _CacheRecorder:
    """A CacheSequence without tokens that records what a model keeps in transformers' cache."""

    spans: dict[int, AttentionSpan]
    start: int = 0
    layers: dict[CacheCall, LayerSpec] = field(default_factory=dict)

    def extend(
        self, call: CacheCall, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if call in self.layers:
            raise Refusal("keeps keys and values more than once per layer")
        shapes = tuple(key.shape), tuple(value.shape)
        if any(len(s) != 4 or s[0] != 1 or s[2] != _NUM_TOKENS for s in shapes):
            raise Refusal("keeps something other than one key and value per token")
        if key.shape[1] != value.shape[1]:
            raise Refusal("keeps keys and values of unequal numbers of heads")
        self.layers[call] = LayerSpec(
            module_name="",
            num_heads=key.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            span=FULL if call.is_index else self.spans.get(call.layer, FULL),
            has_softcap=False,
            has_sinks=False,
            pool_index=len(self.layers),
            stores_kv=True,
        )
        return key, value


def _gathered(model: Any, config: Any, refusal: Refusal) -> ModelSpec:
    """Return the spec of a model for the gathered path.

    `refusal` says why it cannot run on paged attention; it is raised, with a second reason, if the
    model cannot run on the gathered path either.
    """
    parameters = inspect.signature(model.forward).parameters
    if getattr(type(model), "_is_stateful", False):
        raise refusal
    if "past_key_values" not in parameters:
        raise Refusal(f"{refusal}, and takes no cache of keys and values")
    recorder = _CacheRecorder(spans_of(config))
    num_layers = _num_cache_layers(config)
    try:
        with watching_reads(model) as reads:
            _run(model, past_key_values=cache_over(recorder, num_layers, {}), use_cache=True)
    except Refusal as second:
        raise Refusal(f"{refusal}, and {second}") from second
    except ProbeInconclusive as error:
        if isinstance(error.__cause__, (AttributeError, LookupError, TypeError, ValueError)):
            raise refusal from error  # it asks more of a cache than keys and values
        raise
    if not recorder.layers:
        raise Refusal(f"{refusal}, and keeps nothing in the cache it is given")
    gathered = Gathered(str(refusal), tuple(recorder.layers), num_layers)
    spec = _model_spec(model, config, tuple(recorder.layers.values()), gathered)
    return replace(spec, read_elsewhere=tuple(sorted(reads)))


def _num_cache_layers(config: Any) -> int:
    """Return a number of layers that is enough for every layer index of the model's cache."""
    text_config = config.get_text_config()
    counts = [getattr(text_config, name, None) for name in ("num_hidden_layers", "num_layers")]
    return 2 * max((count for count in counts if isinstance(count, int)), default=0)


def _build(meta: MetaModel, limit: ParameterLimit | None, implementation: str | None = None) -> Any:
    """Build the model on the meta device, with the probe as its attention or as named."""
    own = OWN_ATTENTION.get(meta.config.model_type)
    register_probe()
    try:
        with limit.guarded() if limit is not None else nullcontext():
            model = meta.build(implementation or ("eager" if own else PROBE))
    except TooLarge:
        raise
    except Exception as error:  # each model class raises its own error types
        if PROBE in str(error):
            raise Refusal(_NO_INTERFACE) from error
        if "Unrecognized configuration class" in str(error):
            raise NotCausal("is not a causal language model") from error
        _log.info("the model cannot be built: %s", in_one_line(error))
        raise NotCausal("cannot be built from its configuration") from error
    if own is not None and implementation is None:
        replace_own_attention(model, own, _attend)
    return model


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The probe's attention function: pass the call to the model's recorder."""
    recorder: _Recorder = module.__dict__[_RECORDER]
    return recorder.attend(module, *args, **kwargs)


def _describe_mask(*args: Any, **kwargs: Any) -> MaskDescriptor:
    return MaskDescriptor(kwargs["mask_function"])
