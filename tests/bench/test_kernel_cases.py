"""What `bench kernels` measures is right on a small shape, and refused where there is no GPU."""

import pytest
import torch

from kvchat.bench.ceilings import Bandwidth
from kvchat.bench.kernel_cases import KernelCase, KernelShape, Place, kernel_cases
from kvchat.bench.kernels import case_figures, run
from kvchat.bench.measure import Sample
from kvchat.bench.scenarios import NAMES, BenchSetup, scenario
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.model.source import find_model

SHAPE = KernelShape(32, 48, 4, 2, 16, 100, 3)
PLACE = Place(torch.device("cpu"), torch.float32, 4096)


@pytest.fixture(scope="module")
def cases() -> list[KernelCase]:
    torch.manual_seed(0)
    return list(kernel_cases(SHAPE, PLACE, (40,)))


def test_every_case_computes_what_its_twin_does_on_every_set(cases: list[KernelCase]) -> None:
    assert len({case.name for case in cases}) == len(cases) > 20
    for case in cases:
        assert case.is_right(), case.name
        assert case.num_bytes > 0
        for index in range(case.num_sets):
            assert case.run(index).numel() > 0


def test_data_is_more_than_the_cache_holds_twice(cases: list[KernelCase]) -> None:
    cold = [case for case in cases if case.num_sets > 1]

    assert cold
    assert all(case.num_sets * case.num_bytes > 2 * PLACE.cache_bytes for case in cold)


def test_peers_compute_the_same_where_masks_do_not_differ(cases: list[KernelCase]) -> None:
    compared = [case for case in cases if case.peer is not None and "5 rows on" not in case.name]
    assert len(compared) > 10
    for case in compared:
        assert case.peer is not None
        theirs = case.peer(0)
        assert isinstance(theirs, torch.Tensor)
        assert torch.allclose(case.run(0).flatten(), theirs.flatten(), atol=1e-4), case.name


def test_a_wrong_kernel_is_seen(cases: list[KernelCase]) -> None:
    norm = cases[0]
    wrong = KernelCase(norm.name, 1, False, 1, lambda i: norm.run(i) * 1.1, norm.twin)

    assert not wrong.is_right()


def test_figures_are_read_against_the_bandwidth_and_the_peer(cases: list[KernelCase]) -> None:
    case = next(case for case in cases if case.peer is not None)
    counted = []

    def measure(calls: object) -> Sample:
        counted.append(calls())  # type: ignore[operator]
        return Sample((2e-6 * len(counted),))

    own, beside = case_figures(case, Bandwidth(read=1e9, copy=2e9), measure)

    assert all(number >= 64 for number in counted)
    assert own.value == pytest.approx(2.0)
    assert own.beside == pytest.approx(case.num_bytes / 1e3)
    assert beside.ratio == pytest.approx(2.0)


def test_a_prefill_is_read_as_a_rate_of_products(cases: list[KernelCase]) -> None:
    """40 new tokens see 1 to 40 keys, 820 pairs; in each of 4 heads two sums of 16 products."""
    case = next(case for case in cases if case.num_flops)

    (figure,) = case_figures(case, Bandwidth(read=1e9, copy=2e9), lambda calls: Sample((1e-6,)))

    assert case.num_flops == 820 * 4 * (2 * 16 + 2 * 16)
    assert figure.unit == "TFLOP/s"
    assert figure.value == pytest.approx(case.num_flops / 1e-6 / 1e12)
    assert figure.ratio == pytest.approx(1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_scenario_says_so_in_one_sentence() -> None:
    setup = BenchSetup(find_model("demo"), ModelConfig("demo"), CacheConfig(), 1, True, None)

    result = run(setup)

    assert "kernels" in NAMES
    assert scenario("kernels") is run
    assert result.refusal == "kernels run on a CUDA device, and this run has none"
    assert not result.figures
