"""Scenario `kernels`: the time of each kernel on a GPU, beside what memory bandwidth allows.

Captured in CUDA graphs, as a decode step runs them, on data that the cache does not hold. No figure
where a kernel does not compute what its twin does.
"""

from collections.abc import Callable

import torch
from transformers import AutoConfig

from kvchat.bench.ceilings import Bandwidth, measure_bandwidth
from kvchat.bench.kernel_cases import KernelCase, KernelShape, Place, kernel_cases
from kvchat.bench.measure import Sample
from kvchat.bench.report import Figure, Result
from kvchat.bench.scenarios import BenchSetup
from kvchat.model.device import choose_device

_CONTEXTS = (1024, 8192, 32768)
_MIN_CALLS = 64


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
    bandwidth = measure_bandwidth(device)
    contexts = tuple(setup.scaled(length) for length in _CONTEXTS)
    figures: list[Figure] = []
    for case in kernel_cases(shape, place, contexts):
        if not case.is_right():
            reason = f"{case.name}: not what plain torch computes"
            return Result("kernels", settings, refusal=reason)
        figures += case_figures(case, bandwidth, lambda call: _on_gpu(call, setup.repeats))
    notes = (
        f"measured read bandwidth {bandwidth.read / 1e9:,.0f} GB/s, "
        f"copy {bandwidth.copy / 1e9:,.0f} GB/s; a call of few bytes is bound by its launch",
    )
    return Result("kernels", settings, tuple(figures), notes=notes)


def case_figures(
    case: KernelCase, bandwidth: Bandwidth, measure: Callable[[Callable[[], int]], Sample]
) -> list[Figure]:
    """Return a kernel's time beside its ceiling's, and beside its peer's where it has one.

    measure   takes what makes some calls and returns their number; returns seconds per call
    """
    ours = measure(_every_set(case, case.run))
    if case.num_flops:
        return _product_figures(case, ours, measure)
    limit = bandwidth.read if case.is_read_only else bandwidth.copy
    ceiling_us = case.num_bytes / limit * 1e6
    median_us = ours.median * 1e6
    figures = [
        Figure(
            f"{case.name}: {case.num_bytes / 1e6:,.3g} MB",
            median_us,
            "us",
            beside=ceiling_us,
            beside_name="at the bandwidth of " + ("reading" if case.is_read_only else "a copy"),
            ratio=ceiling_us / median_us,
            ratio_name="of the bandwidth",
            spread=ours.spread,
        )
    ]
    if case.peer is not None:
        theirs_us = measure(_every_set(case, case.peer)).median * 1e6
        figures.append(
            Figure(
                f"{case.name}: beside torch",
                median_us,
                "us",
                beside=theirs_us,
                beside_name=case.peer_name,
                ratio=theirs_us / median_us,
                ratio_name="times as fast",
            )
        )
    return figures


def _product_figures(
    case: KernelCase, ours: Sample, measure: Callable[[Callable[[], int]], Sample]
) -> list[Figure]:
    """Return the rate of a kernel that its products bound, beside its peer's."""
    rate = case.num_flops / ours.median / 1e12
    if case.peer is None:
        return [Figure(case.name, rate, "TFLOP/s", spread=ours.spread)]
    theirs = case.num_flops / measure(_every_set(case, case.peer)).median / 1e12
    return [
        Figure(
            case.name,
            rate,
            "TFLOP/s",
            beside=theirs,
            beside_name=case.peer_name,
            ratio=rate / theirs,
            ratio_name="times as fast",
            spread=ours.spread,
        )
    ]


def _every_set(case: KernelCase, call: Callable[[int], object]) -> Callable[[], int]:
    """Return what calls once or more for each set of data, one after another."""
    rounds = max(1, _MIN_CALLS // case.num_sets)

    def calls() -> int:
        for _ in range(rounds):
            for index in range(case.num_sets):
                call(index)
        return rounds * case.num_sets

    return calls


def _on_gpu(calls: Callable[[], int], repeats: int) -> Sample:
    """Capture the calls in a graph and replay it; seconds per call by the device's clock."""
    num_calls = calls()  # compiles, and fills what is computed once
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
