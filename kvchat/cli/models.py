"""`kvchat models info`: prints a model's properties and whether it can be run.

Reads configurations, and weights only where the configuration is not enough.
"""

import json
from datetime import datetime
from typing import Any

from kvchat.chat.chat_model import read_chat_model
from kvchat.chat.template import NewTurn, Strategy
from kvchat.cli.build import settings_of, state_memory
from kvchat.cli.lines import print_line
from kvchat.cli.model_names import whole_name
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.core.parameters import FEWER_BITS, KV_CODES
from kvchat.core.paths import require_working_directory
from kvchat.core.text import format_bytes
from kvchat.model.checkpoint.source import DEMO, ModelSource, find_model


def info(name: str, device: str, as_json: bool, adapter: str | None = None) -> None:
    """Print a model's properties, then raise ModelUnsupported if it cannot be run."""
    require_working_directory()
    settings = settings_of({})
    source = find_model(whole_name(settings, name), adapter)
    facts, refusal = _facts(source, device)
    if as_json:
        print_line(json.dumps(facts, ensure_ascii=True))
    else:
        for key, value in facts.items():
            print_line(f"{key.replace('_', ' '):22} {value}")
    if refusal is not None:
        raise refusal


def _facts(source: ModelSource, device: str) -> tuple[dict[str, Any], ModelUnsupported | None]:
    from kvchat.model.hf.lean_import import import_transformers

    import_transformers()
    from kvchat.model.loader import inspect_model

    facts: dict[str, Any] = {"model": source.name, "directory": str(source.directory)}
    card = source.directory / "README.md"
    if source.name == DEMO and card.is_file():
        facts["card"] = str(card)
    if source.adapter is not None:
        facts["adapter"] = str(source.adapter.directory)
    try:
        config, spec = inspect_model(source)
        if spec is None:
            spec = _loaded_spec(source, device)
    except ModelUnsupported as error:
        return {**facts, "supported": f"no: {error.message}"}, error
    facts |= _text_facts(source)
    facts |= _size_facts(source, spec, config, device)
    return facts, None


def _loaded_spec(source: ModelSource, device: str) -> Any:
    from kvchat.model.loader import load_model

    return load_model(source, ModelConfig(source.name, device), None, lambda event: None).spec


def _size_facts(source: ModelSource, spec: Any, config: Any, device: str) -> dict[str, Any]:
    """Return architecture and sizes; token counts are for the default cache budgets."""
    import torch

    from kvchat.engine.kv_storage import kv_geometry
    from kvchat.model.checkpoint.tensors import stays_packed
    from kvchat.model.device import choose_device, dtype_name
    from kvchat.model.files.checkpoint_files import read_json
    from kvchat.model.gpu.memory import runs_fused
    from kvchat.model.packed.formats import packing_of
    from kvchat.model.spec import attention_in_words

    where = choose_device(ModelConfig(device=device))
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    geometry = kv_geometry(spec, CacheConfig(), dtype)
    weights = sum(path.stat().st_size for path in source.weight_files)
    packed = {}
    spans = sorted({str(s.window or s.chunk or "full") for s in (x.span for x in spec.layers)})
    blocks = {}
    if source.gguf is not None:
        from kvchat.model.gguf.tensors import bits_of_formats
        from kvchat.model.loader import memory_of_weights

        needed = format_bytes(memory_of_weights(source, config, spec, where))
        blocks = {"blocks": bits_of_formats(source.gguf), "memory": f"{needed} for the weights"}
    elif packing := packing_of(read_json(source.config_file) or {}, source.name):
        is_cpu = where.type == "cpu"
        stays = (is_cpu or runs_fused(spec)) and stays_packed(source, dtype, is_cpu)
        how = "stays packed" if stays else "unpacked when loaded"
        packed = {"packed": f"{packing.title}, {how}"}
    return {
        "supported": "yes",
        "architecture": spec.architecture,
        "parameters": f"{spec.num_parameters / 1e6:,.1f} M",
        "weights": format_bytes(weights),
        **blocks,
        **packed,
        **_rounding_facts(source, dtype),
        "dtype": dtype_name(dtype),
        "layers": f"{len(spec.layers)} with attention" if spec.state else len(spec.layers),
        "attention": attention_in_words(spec, where, dtype) if spec.layers else "none",
        "path": _path(spec),
        **_head_facts(source, config, spec, where),
        "windows": _windows(spec, spans),
        "reads": _inputs(config),
        "context": f"{spec.max_context:,} tokens",
        "kv_per_token": format_bytes(geometry.token_bytes if spec.layers else 0),
        **_state_facts(spec, geometry, config, dtype),
        "fits_on_device": _fitting(spec, CacheConfig(), where, dtype),
        **_code_facts(source, spec, where, dtype),
    }


def _fitting(spec: Any, config: CacheConfig, device: Any, dtype: Any) -> str:
    """Return how many tokens of a context fit, for the default budget."""
    from kvchat.engine.kv_storage import device_budget, kv_geometry, pool_budget, tokens_within

    budget, geometry = device_budget(config, device), kv_geometry(spec, config, dtype)
    of_pools = pool_budget(spec, dtype, budget)
    num_tokens = tokens_within(spec, geometry, config, device, of_pools)
    return f"{num_tokens:,} tokens in {format_bytes(budget)}"


def _code_facts(source: ModelSource, spec: Any, device: Any, dtype: Any) -> dict[str, str]:
    """Return what fits in each code that the model can have, and what the code was seen to do."""
    from kvchat.engine.kv_choice import known_sentence
    from kvchat.engine.kv_storage import require_kv_dtype
    from kvchat.model.checkpoint.identity import sample_digest

    facts, identity, memory = {}, sample_digest(source), state_memory()
    for code in KV_CODES:
        config = CacheConfig(kv_dtype=code)
        try:
            require_kv_dtype(source.name, spec, config)
        except ModelError:
            continue
        known = known_sentence(identity, dtype, code, memory)
        fitting = _fitting(spec, config, device, dtype)
        facts[f"fits_in_{code}"] = f"{fitting}. {known}" if known else fitting
    return facts


def _rounding_facts(source: ModelSource, dtype: Any) -> dict[str, Any]:
    """Return what rounding the weights did, for the forms that were loaded before."""
    from kvchat.model.checkpoint.identity import sample_digest
    from kvchat.model.rounding import known_effect

    identity, memory = sample_digest(source), state_memory()
    known = {form: known_effect(identity, form, dtype, memory) for form in FEWER_BITS}
    return {form: effect.sentence(form) for form, effect in known.items() if effect is not None}


def _path(spec: Any) -> str:
    if spec.state:
        return "recurrent state"
    return "paged" if spec.gathered is None else "gathered, one sequence at a time"


def _head_facts(source: ModelSource, config: Any, spec: Any, where: Any) -> dict[str, str]:
    from kvchat.model.checkpoint.drafters import own_drafter
    from kvchat.model.checkpoint.tensors import stored_names
    from kvchat.model.next_head import find_layout

    is_on_cpu = where.type == "cpu"
    if spec.gathered is not None or not (is_on_cpu or spec.state):
        return {}  # such a model shows no hidden states
    if is_on_cpu and (drafter := own_drafter(source)) is not None:
        return {"drafts": f"{drafter.name}, by --spec"}
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    has_head = find_layout(stored_names(source), num_layers) is not None
    return {"drafts": "its own head for the next token, by --spec"} if has_head else {}


def _windows(spec: Any, spans: list[str]) -> str:
    if spec.gathered is not None and spans == ["full"]:
        return "as in the model's own code"
    return ", ".join(spans) or "none"


def _state_facts(spec: Any, geometry: Any, config: Any, dtype: Any) -> dict[str, Any]:
    """Return the size of a snapshot of recurrent state; nothing for a model without any."""
    from kvchat.model.state import state_bytes

    if not spec.state:
        return {}
    num_bytes = state_bytes(spec.state, dtype)
    num_layers = len({tensor.layer for tensor in spec.state})
    if not spec.layers:  # all are recurrent, and RWKV has one object for all
        num_layers = config.get_text_config().num_hidden_layers
    as_kv = (
        f", as much as KV of {num_bytes // geometry.token_bytes:,} tokens" if spec.layers else ""
    )
    return {
        "state": f"{format_bytes(num_bytes)} a snapshot in {num_layers} recurrent layers{as_kv}",
    }


def _inputs(config: Any) -> str:
    from kvchat.model.hf.model_class import loads_towers, reads_more_than_text

    if not reads_more_than_text(config):
        return "text"
    if loads_towers(config):
        return "text alone; its parts for images or sound are loaded and not used"
    return "text alone; its parts for images or sound are left out of memory"


def _text_facts(source: ModelSource) -> dict[str, Any]:
    try:
        model = read_chat_model(source)
    except ModelError as error:
        return {"chat_template": f"unusable: {error.message}"}
    strategy = model.format.strategy
    how = {
        Strategy.APPEND_SAFE: "appending equals rendering again",
        Strategy.REWRITES_LAST_ANSWER: "would rewrite the last answer; kvchat appends instead",
        Strategy.REWRITES_HISTORY: "would rewrite history; kvchat appends instead",
        Strategy.NO_TEMPLATE: "texts follow one another",
    }[strategy]
    opening = model.format.opening(NewTurn("", datetime(2026, 1, 2)))
    return {"chat_template": f"{strategy.value}: {how}", "opening": f"{len(opening)} tokens"}
