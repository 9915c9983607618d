"""`kvchat bench trace`: replays a trace through tiers, and prints the hits of each rule."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median, quantiles

from kvchat.bench.traces import synthetic
from kvchat.bench.traces.paths import PathTrace
from kvchat.bench.traces.records import BLOCK_TOKENS, read_trace
from kvchat.bench.traces.simulation import RULES, Replay, Speed, TierPlan, replay, routed
from kvchat.cli.lines import print_line
from kvchat.core.errors import UsageError
from kvchat.core.text import format_bytes, parse_size, shown

DEFAULT_TIERS = ("memory:4G", "disk:20G:1G:2ms")
_GB = 1 << 30
_TOKEN_BYTES, _PREFILL = 128.0 * 1024, 1000.0


@dataclass(frozen=True, slots=True)
class TraceRun:
    """What to replay: a file or the name of a synthetic trace, tiers as texts, and the machine."""

    source: str
    tiers: tuple[str, ...]
    speed: Speed
    num_machines: int = 1
    num_requests: int = 20_000
    seed: int = 0


def speed_of(model: str | None, token_bytes: str | None, prefill: int | None) -> Speed:
    """Return the size of a token's KV and how fast it is computed: as given, else a model's."""
    speed = Speed(_TOKEN_BYTES, _PREFILL)
    if model is not None:
        from kvchat.cli.sizing import size_and_speed

        size, machine = size_and_speed(model)
        speed = Speed(size.kv_bytes(4096) / 4096, machine.prefill_rate(size), size.half_context)
    if token_bytes is not None:
        num_bytes = parse_size(token_bytes, "--token-bytes").resolve(0)
        speed = replace(speed, token_bytes=float(max(1, num_bytes)))
    return speed if prefill is None else replace(speed, tokens_per_s=float(prefill))


def run_trace(run: TraceRun) -> None:
    """Replay and print a table for each size of the tiers, then one JSON document."""
    plans = list(tier_plans(run.tiers or DEFAULT_TIERS))
    began_s = time.perf_counter()
    trace = _read(run)
    if not len(trace):
        raise UsageError(f"{run.source} has no requests.")
    machines, num_machines = routed(trace, run.num_machines)
    days = (trace.time_s[-1] - trace.time_s[0]) / 86400
    print_line(
        f"{run.source}: {len(trace):,} requests in {days:.2f} days, "
        f"{trace.num_blocks:,} different blocks of {trace.block_tokens} tokens "
        f"({format_bytes(int(trace.num_blocks * trace.block_tokens * run.speed.token_bytes))}), "
        f"{num_machines:,} machine{'s' if num_machines > 1 else ''}; "
        f"read in {time.perf_counter() - began_s:.1f} s"
    )
    documents = []
    for tiers in plans:
        print_line("")
        print_line(_describe(tiers, num_machines))
        rows = [("", *(tier.name for tier in tiers), "all hits", "saved", *_TIMES, "requests/min")]
        for rule in RULES:
            began_s = time.perf_counter()
            result = replay(trace, tiers, run.speed, rule, machines)
            a_minute = len(trace) / (time.perf_counter() - began_s) * 60
            rows.append(_row(result, tiers, a_minute))
            documents.append(_document(result, tiers, a_minute))
        _print_rows(rows)
    print_line(
        "\n" + json.dumps({"trace": run.source, "machines": num_machines, "results": documents})
    )


def tier_plans(texts: Sequence[str]) -> Iterator[tuple[TierPlan, ...]]:
    """Yield the tiers of `NAME:SIZE[,SIZE...][:RATE[:LATENCY[:PRICE]]]`, for each of the sizes."""
    each = [_tier(text) for text in texts]
    names = [tiers[0].name for tiers in each]
    if len(set(names)) < len(names):
        raise UsageError("Two tiers have one name.", "Name them memory, disk, shared, for example.")
    yield from product(*each)


def _tier(text: str) -> list[TierPlan]:
    name, *parts = text.split(":")
    if not name or not 1 <= len(parts) <= 4:
        raise UsageError(
            f"--tier is {shown(text)}, but must be NAME:SIZE[:RATE[:LATENCY[:PRICE]]], "
            "like disk:20G:1G:2ms:0.08."
        )
    sizes = [parse_size(size, "--tier").resolve(0) for size in parts[0].split(",")]
    plan = TierPlan(name, sizes[0])
    if len(parts) > 1:
        rate = parse_size(parts[1].removesuffix("/s"), "a tier's rate").resolve(0)
        plan = replace(plan, bytes_per_s=float(max(1, rate)))
    if len(parts) > 2:
        plan = replace(plan, latency_s=_seconds(parts[2]))
    if len(parts) > 3:
        plan = replace(plan, price=_number(parts[3], "a tier's price"))
    return [replace(plan, num_bytes=size) for size in sizes]


def _seconds(text: str) -> float:
    if text.endswith("ms"):
        return _number(text[:-2], "a tier's latency") / 1e3
    return _number(text.removesuffix("s"), "a tier's latency")


def _number(text: str, name: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e18:
        raise UsageError(f"{name} is {shown(text)}, but must be a number of 0 or more.")
    return number


def _read(run: TraceRun) -> PathTrace:
    if run.source in synthetic.NAMES and not Path(run.source).exists():
        requests = synthetic.synthetic(run.source, run.num_requests, run.seed)
        return PathTrace(BLOCK_TOKENS, requests)
    if not Path(run.source).is_file():
        raise UsageError(
            f"There is no file {shown(run.source)}.",
            f"Synthetic traces are {', '.join(synthetic.NAMES)}.",
        )
    return PathTrace(*read_trace(Path(run.source)))


def _describe(tiers: Sequence[TierPlan], num_machines: int) -> str:
    words = []
    price = 0.0
    for tier in tiers:
        price += tier.price * tier.num_bytes / _GB * (1 if tier.is_shared else num_machines)
        rate = (
            ""
            if tier.bytes_per_s == float("inf")
            else f" at {format_bytes(int(tier.bytes_per_s))}/s"
        )
        latency = f" after {tier.latency_s * 1e3:g} ms" if tier.latency_s else ""
        words.append(f"{tier.name} {format_bytes(tier.num_bytes)}{rate}{latency}")
    cost = f"; {price:,.2f} a month" if price else ""
    return ", ".join(words) + cost


_TIMES = ("mean s", "median s", "95 % s")


def _row(result: Replay, tiers: Sequence[TierPlan], a_minute: float) -> tuple[str, ...]:
    shares = [f"{result.found_tokens[t.name] / result.prompt_tokens:.1%}" for t in tiers]
    times = [f"{seconds:.3g}" for seconds in _times(result)]
    hits = (f"{result.hit_rate:.1%}", f"{result.saved_share:.1%}")
    return (result.rule, *shares, *hits, *times, f"{a_minute:,.0f}")


def _times(result: Replay) -> tuple[float, float, float]:
    """Return the mean, the median and the 95th percentile of the time to the first token."""
    seconds = result.first_token_s
    high = quantiles(seconds, n=20)[-1] if len(seconds) > 1 else seconds[0]
    return fmean(seconds), median(seconds), high


def _document(result: Replay, tiers: Sequence[TierPlan], a_minute: float) -> dict[str, object]:
    mean_s, median_s, high_s = _times(result)
    return {
        "rule": result.rule,
        "tiers": {tier.name: tier.num_bytes for tier in tiers},
        "found_tokens": result.found_tokens,
        "prompt_tokens": result.prompt_tokens,
        "saved_share": result.saved_share,
        "first_token_s": {"mean": mean_s, "median": median_s, "p95": high_s},
        "requests_a_minute": a_minute,
    }


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print_line("  " + "  ".join((first, *rest)))
    sys.stdout.flush()
