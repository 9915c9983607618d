"""`kvchat bench plan` and `kvchat models fit`: what fits this machine, and how fast it would be."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvchat.bench.plan import Plan, run_small
from kvchat.bench.probe import known_speed, machine_speed
from kvchat.cache.disk.lookup import KnownModels
from kvchat.cache.planner import RateMemory, from_tier, known_prefill_rate
from kvchat.cli.build import settings_of, state_memory
from kvchat.cli.lines import print_line
from kvchat.cli.model_names import model_directories, whole_name
from kvchat.cli.settings import Settings
from kvchat.core.config import ModelConfig
from kvchat.core.errors import ModelError, UsageError
from kvchat.core.stats import ASSUMED_BYTES_PER_S, num_like_first
from kvchat.core.text import format_bytes, shown
from kvchat.core.types import Memory
from kvchat.engine.sizing import (
    MachineSpeed,
    ModelSize,
    contexts_of,
    known_model,
    known_models,
    size_of,
    with_weights_of,
)
from kvchat.model.checkpoint.local_models import LocalModel, local_models
from kvchat.model.checkpoint.source import find_model
from kvchat.model.checkpoint.used_models import UsedModels
from kvchat.model.device import choose_device, free_bytes

# Host memory is copied to a GPU at about this rate where it was never measured.
_ASSUMED_HOST_RATE = 1e10
_PROMPT = 1000
_CODES = ("int8", "k8v4")
# A reader takes in some ten tokens a second.
_WELL = 10.0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`bench plan`'s arguments. `bits` None takes the weights as they are."""

    model: str
    memory_bytes: int
    reserve_bytes: int
    num_sessions: int
    num_tokens: int
    reserved_tokens: int | None = None
    bits: float | None = None
    kv_dtype: str = "auto"
    runs: bool = False
    as_json: bool = False


def run_plan(request: PlanRequest) -> None:
    """Print what fits in which tier, and what resuming a session costs from each."""
    size = _size(request.model)
    if request.bits is not None:
        if known_model(size.name) is None:
            raise UsageError("--bits is for models of the table alone; a file has its own.")
        size = with_weights_of(size, request.bits / 8)
    reserved = request.reserved_tokens or size.max_context
    plan = Plan(
        size,
        request.memory_bytes,
        request.reserve_bytes,
        request.num_tokens,
        reserved,
        request.kv_dtype,
    )
    if not plan.kv_budget:
        raise UsageError(
            f"The weights of {size.name} take {format_bytes(size.weight_bytes)}, which leaves no "
            f"room for KV in {format_bytes(request.memory_bytes)}.",
        )
    rows = list(_plan_rows(plan, request))
    if request.as_json:
        print_line(json.dumps(dict(rows)))
        return
    for name, value in rows:
        print_line(f"{name:28} {value}")


def _plan_rows(plan: Plan, request: PlanRequest) -> Iterator[tuple[str, str]]:
    size, tokens = plan.size, plan.num_tokens
    yield "model", size.name
    yield "weights", format_bytes(size.weight_bytes)
    yield "kept free", format_bytes(plan.reserve_bytes)
    yield "left for KV", format_bytes(plan.kv_budget)
    yield "KV of a session", f"{format_bytes(plan.session_bytes)} for {tokens:,} tokens"
    held = min(request.num_sessions, plan.num_paged)
    yield "sessions in blocks of 16", f"{plan.num_paged:,}, so {held:,} of {request.num_sessions:,}"
    yield (
        "sessions reserved whole",
        f"{plan.num_contiguous:,} where each reserves {plan.reserved_tokens:,} tokens",
    )
    if request.runs:
        whole, paged = run_small(plan)
        yield "run with a pool of as many blocks", f"{paged:,} in blocks, {whole:,} reserved whole"
    rest = request.num_sessions - held
    yield (
        "other sessions",
        f"{rest:,}: {format_bytes(rest * plan.session_bytes)} on the disk or in host memory",
    )
    yield from _resume_rows(plan)


def _resume_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what resuming a session costs from each tier, and by computing it again."""
    memory = state_memory()
    rates, speed = (
        _rates(plan.size.name, memory),
        machine_speed(memory, choose_device(ModelConfig())),
    )
    yield "resumed on the device", "at once: its KV is where the model reads it"
    for tier, assumed in (("host", _ASSUMED_HOST_RATE), ("disk", ASSUMED_BYTES_PER_S)):
        known = rates.get(from_tier(tier))
        rate = known or assumed
        words = f"{'measured' if known else 'assumed'} {rate / 1e9:.3g} GB/s"
        yield f"resumed from {tier}", f"{plan.session_bytes / rate:.3g} s at {words}"
    computed, half = known_prefill_rate(rates)
    if computed is not None:
        seconds, how = num_like_first(0, plan.num_tokens, half) / computed, "measured"
    else:
        seconds, how = speed.first_token_s(plan.size, plan.num_tokens), "predicted for this machine"
    yield "computed again", f"{seconds:.3g} s, {how}"


def size_and_speed(name: str) -> tuple[ModelSize, MachineSpeed]:
    """Return a model's sizes and this machine's speed."""
    return _size(name), machine_speed(state_memory(), choose_device(ModelConfig()))


def _rates(name: str, memory: Memory) -> dict[str, float]:
    """Return the measured rates of a model that ran here, by their names; none of another."""
    models = [each for each in KnownModels(memory).read().values() if each.name == name]
    return RateMemory(memory, models[-1].rates).read() if models else {}


def _size(name: str) -> ModelSize:
    """Return the sizes of a model of the table, or of a local one."""
    size = known_model(name)
    if size is not None:
        return size
    from kvchat.model.hf.lean_import import import_transformers

    import_transformers()
    settings = settings_of({})
    whole = whole_name(settings, name)
    if not Path(whole).exists() and whole not in {model.name for model in _local(settings)}:
        raise UsageError(
            f"There is no model {shown(name)} here, nor in the table of known models.",
            "`kvchat models fit` lists both.",
        )
    try:
        return size_of(find_model(whole))
    except ValueError as error:
        raise ModelError(f"{name} cannot be sized: {error}.") from error


def _local(settings: Settings) -> list[LocalModel]:
    used = UsedModels(state_memory()).read()
    return local_models(used, model_directories(settings))


# What fits


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on this machine: predicted rates behind a prompt of a thousand tokens."""

    size: ModelSize
    needed_bytes: int
    free_bytes: int
    first_token_s: float
    tokens_per_s: float

    @property
    def verdict(self) -> str:
        if self.needed_bytes > self.free_bytes:
            return "no room"
        return "well" if self.tokens_per_s >= _WELL else "slowly"


def fit_of(size: ModelSize, speed: MachineSpeed, free: int) -> Fit:
    """Return how a model would run with `free` bytes of memory."""
    needed = size.weight_bytes + size.kv_bytes(min(4096, size.max_context))
    return Fit(
        size,
        needed,
        free,
        speed.first_token_s(size, _PROMPT),
        speed.decode_rate(size, _PROMPT),
    )


def in_order(fits: Sequence[Fit]) -> list[Fit]:
    """Return the models that run well, the largest first; then slow ones, the fastest first; then
    those without room, the smallest first.
    """
    order = {"well": 0, "slowly": 1, "no room": 2}

    def key(fit: Fit) -> tuple[int, float]:
        rank = order[fit.verdict]
        return rank, (-fit.size.body, -fit.tokens_per_s, float(fit.needed_bytes))[rank]

    return sorted(fits, key=key)


def run_fit(names: Sequence[str], as_json: bool) -> None:
    """Print how models would run here: the named ones, or local ones and the table."""
    device, memory = choose_device(ModelConfig()), state_memory()
    speed, free = machine_speed(memory, device), free_bytes(device)
    sizes = [_size(name) for name in names] if names else [*_local_sizes(), *known_models()]
    fits = in_order([fit_of(size, speed, free) for size in sizes])
    if as_json:
        print_line(json.dumps([_document(fit) for fit in fits]))
        return
    print_line(
        f"Memory: {format_bytes(free)} free, read at {speed.read / 1e9:.3g} GB/s; products: "
        f"{speed.products / 1e12:.3g} TFLOP/s.\n"
        "Rates are predicted. Weights of models that are not here: 4 bits (Q4_K_M)."
    )
    if known_speed(memory, device) is None:
        print_line("The machine is busy: its speed was measured beside other work, for now alone.")
    width = max(len(fit.size.name) for fit in fits)
    heads = f"{'weights':>9}  {'KV of 4k':>9}  {'prompt 1k':>9}  {'tokens/s':>8}"
    print_line(f"{'':{width}}  {'runs':7}  {heads}")
    for fit in fits:
        print_line(_line(fit, width))
        if names:
            for line in _kv_lines(fit.size):
                print_line(line)
        if fit.size.command and fit.verdict != "no room":
            print_line(f"    {fit.size.command}")


def _line(fit: Fit, width: int) -> str:
    size = fit.size
    kv_bytes = size.kv_bytes(min(4096, size.max_context))
    return (
        f"{size.name:{width}}  {fit.verdict:7}  {format_bytes(size.weight_bytes):>9}"
        f"  {format_bytes(kv_bytes):>9}  {fit.first_token_s:>7.3g} s  {fit.tokens_per_s:>8.3g}"
    )


def _kv_lines(size: ModelSize) -> Iterator[str]:
    """Yield a context's KV in 16 bits and in codes."""
    for context in contexts_of(size):
        codes = ", ".join(f"{format_bytes(size.kv_bytes(context, c))} in {c}" for c in _CODES)
        yield f"    KV of {context:,} tokens: {format_bytes(size.kv_bytes(context))}, {codes}"


def _local_sizes() -> Iterator[ModelSize]:
    """Yield the sizes of the models on this machine that kvchat can run."""
    from kvchat.model.hf.lean_import import import_transformers

    import_transformers()
    for model in _local(settings_of({})):
        if model.trouble:
            continue
        try:
            size = size_of(find_model(model.name))
        except (ModelError, ValueError, OSError):
            continue  # `kvchat models info` says why
        yield replace(size, name=Path(model.name).name)


def _document(fit: Fit) -> dict[str, object]:
    size = fit.size
    return {
        "model": size.name,
        "runs": fit.verdict,
        "weight_bytes": size.weight_bytes,
        "kv_bytes": {str(context): size.kv_bytes(context) for context in contexts_of(size)},
        "first_token_s": round(fit.first_token_s, 3),
        "tokens_per_s": round(fit.tokens_per_s, 2),
        "command": size.command,
    }
