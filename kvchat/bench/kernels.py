"""Scenario `kernels`: the time of each kernel on a GPU, beside the memory bandwidth's limit.

Runs kernels in CUDA graphs, as a decode step does, on data that is not in the GPU's cache. A kernel
whose result differs from its torch reference's, or that fails, has no figures, and a note says why.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import AutoConfig

from kvchat.bench.kernel_cases import (
    KernelCase,
    KernelShape,
    Place,
    case_groups,
    few_rows,
    has_flashinfer,
)
from kvchat.bench.measure import Ceilings, Sample, measure_bandwidth, measure_products
from kvchat.bench.report import Figure, Result, beside_ceiling, over, times_as_fast
from kvchat.bench.setup import BenchSetup
from kvchat.core.errors import in_one_line
from kvchat.model.device import choose_device

_CONTEXTS = (1024, 8192, 32768)
_MIN_CALLS = 64
# A call of fewer bytes is limited by its launch, not by the bandwidth.
_BYTES_BOUND = 16e6


def run(setup: BenchSetup) -> Result:
    """Measure every kernel on the shapes of the subject."""
    device = choose_device(setup.model)
    settings = {"model": setup.source.name, "dtype": "bfloat16", "device": device.type}
    if device.type != "cuda":
        reason = "kernels run on a CUDA device, and this run has none"
        return Result("kernels", settings, refusal=reason)
    shape = KernelShape.of(AutoConfig.from_pretrained(setup.source.directory))
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    place = Place(device, torch.bfloat16, cache_bytes)
    ceilings = Ceilings(measure_bandwidth(device), measure_products(device, place.dtype))
    contexts = tuple(setup.scaled(length) for length in _CONTEXTS)
    figures: list[Figure] = []
    notes = [f"{ceilings.bandwidth}; a call of few bytes is bound by its launch"]
    if not has_flashinfer():
        notes.append("FlashInfer: not installed")
    for name, cases in case_groups(shape, place, contexts):
        found, missing = group_figures(
            name, cases, ceilings, lambda call: _on_gpu(call, setup.repeats)
        )
        figures += found
        notes += missing
    figures += verifying_figures(figures, contexts)
    return Result("kernels", settings, tuple(figures), notes=tuple(notes))


# Takes a function that makes some calls and returns their number; returns the seconds per call.
Measure = Callable[[Callable[[], int]], Sample]


def group_figures(
    name: str, cases: Iterator[KernelCase], ceilings: Ceilings, measure: Measure
) -> tuple[list[Figure], list[str]]:
    """Return the figures of all cases that are right, and the reasons for missing ones."""
    figures: list[Figure] = []
    missing: list[str] = []
    try:
        for case in cases:
            found, reasons = _figures_if_right(case, ceilings, measure)
            figures += found
            missing += reasons
            del case  # its data, before the next case's are made
    except Exception as error:  # making the data may need more memory than there is
        missing.append(f"{name}: the rest is not measured, {in_one_line(error)}")
    return figures, missing


def _figures_if_right(
    case: KernelCase, ceilings: Ceilings, measure: Measure
) -> tuple[list[Figure], list[str]]:
    try:
        if case.is_right():
            return case_figures(case, ceilings, measure)
        return [], [f"{case.name}: no figures, the result differs from plain torch's"]
    except Exception as error:  # kernels and drivers raise any type
        return [], [f"{case.name}: no figures, {in_one_line(error)}"]


def case_figures(
    case: KernelCase, ceilings: Ceilings, measure: Measure
) -> tuple[list[Figure], list[str]]:
    """Return a kernel's time beside its ceilings and peers, and the reasons for missing peers."""
    ours = measure(_every_set(case, case.run))
    figures = list(_beside_ceilings(case, ceilings, ours))
    missing = []
    for peer in case.peers:
        try:
            if peer.is_same and not case.is_near_twin(peer.run(0)):
                missing.append(f"{case.name}: {peer.name} computes another result")
                continue
            theirs = measure(_every_set(case, peer.run))
        except Exception as error:  # peers raise any type
            missing.append(f"{case.name}: {peer.name} failed, {type(error).__name__}")
            continue
        figures.append(_beside_peer(case, ours, theirs, peer.name))
    return figures, missing


def _beside_ceilings(case: KernelCase, ceilings: Ceilings, ours: Sample) -> Iterator[Figure]:
    """Yield a kernel's time beside the time at the first ceiling, and its rate beside the others.

    A kernel with `num_flops` has one figure: its FLOP rate.
    """
    if case.num_flops:
        rate = case.num_flops / ours.median
        name = f"{case.name}: {case.num_flops / 1e12:,.3g} TFLOP"
        yield beside_ceiling(name, rate, "TFLOP/s", ceilings.product, ours.spread)
        return
    named = list(ceilings.bandwidth.ceilings())
    first, *others = named if case.is_read_only else [named[1], named[0], *named[2:]]
    name = f"{case.name}: {case.num_bytes / 1e6:,.3g} MB"
    ceiling_s = case.num_bytes / first[1]
    beside = (first[0], ceiling_s / ours.median, "of the bandwidth")
    yield Figure(name, ours.median * 1e6, "us", ceiling_s * 1e6, *beside, spread=ours.spread)
    if case.num_bytes < _BYTES_BOUND:
        return
    rate = case.num_bytes / ours.median
    for ceiling in others:
        yield beside_ceiling(name, rate, "GB/s", ceiling)


def _beside_peer(case: KernelCase, ours: Sample, theirs: Sample, name: str) -> Figure:
    return times_as_fast(f"{case.name}: beside a peer", ours.median, theirs.median, "us", name)


def verifying_figures(figures: Sequence[Figure], contexts: Sequence[int]) -> Iterator[Figure]:
    """Yield the attention time of verifying five tokens beside decoding one, for each context.

    A context without both figures is left out.
    """
    times = {figure.name: figure.value for figure in figures if figure.unit == "us"}
    for context in contexts:
        one, five = (
            next((value for name, value in times.items() if name.startswith(f"{found}:")), None)
            for found in (few_rows(context, 1), few_rows(context, 5))
        )
        if one is None or five is None:
            continue
        name = f"attention on {context:,} tokens, 5 rows"
        yield over(name, five, "us", ("1 row", one), "times as long", "1.25")


def _every_set(case: KernelCase, call: Callable[[int], object]) -> Callable[[], int]:
    """Return a function that calls `call` on every set of data, at least once, in order."""
    rounds = max(1, _MIN_CALLS // case.num_sets)

    def calls() -> int:
        for _ in range(rounds):
            for index in range(case.num_sets):
                call(index)
        return rounds * case.num_sets

    return calls


def _on_gpu(calls: Callable[[], int], repeats: int) -> Sample:
    """Capture the calls in a graph and replay it; return seconds per call by the device's clock."""
    num_calls = calls()  # warm-up: compiles kernels and fills caches
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / num_calls)
    return Sample(tuple(seconds))
