"""What `bench kernels` measures is right on a small shape, and refused where there is no GPU."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from kvchat.bench.kernel_cases import (
    KernelCase,
    KernelShape,
    Peer,
    Place,
    attention_cases,
    case_groups,
    few_rows,
)
from kvchat.bench.kernels import case_figures, group_figures, run, verifying_figures
from kvchat.bench.measure import Bandwidth, Ceilings, Sample
from kvchat.bench.report import Figure
from kvchat.bench.scenarios import NAMES, scenario
from kvchat.bench.setup import BenchSetup
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.model.checkpoint.source import find_model
from kvchat_kernels.kv_code import CODES, KvCode
from kvchat_kernels.paged_attention import PagedSequences, Scoring, paged_attention

SHAPE = KernelShape(32, 48, 4, 2, 16, 100, 3)
PLACE = Place(torch.device("cpu"), torch.float32, 4096)


@pytest.fixture(scope="module")
def cases() -> list[KernelCase]:
    torch.manual_seed(0)
    return [case for _, group in case_groups(SHAPE, PLACE, (40,)) for case in group]


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
    compared = [(case, peer) for case in cases for peer in case.peers if peer.is_same]
    assert len(compared) >= 8
    for case, peer in compared:
        assert case.is_near_twin(peer.run(0)), f"{case.name}: {peer.name}"
    others = [case.name for case in cases for peer in case.peers if not peer.is_same]
    assert others == [few_rows(40, 5)]


def test_sequences_that_decode_together_are_measured(cases: list[KernelCase]) -> None:
    [batch] = [case for case in cases if "8 sequences" in case.name]
    [alone] = [case for case in cases if case.name == few_rows(40, 1)]

    assert batch.num_bytes == 8 * alone.num_bytes
    assert batch.run(0).shape[0] == 8


def test_a_wrong_kernel_is_seen(cases: list[KernelCase]) -> None:
    norm = cases[0]
    wrong = KernelCase(norm.name, 1, False, 1, lambda i: norm.run(i) * 1.1, norm.twin)

    assert not wrong.is_right()


CEILINGS = Ceilings(Bandwidth(read=1e9, copy=2e9, datasheet=3e9), products=1e12)


def test_figures_are_read_against_the_bandwidth_and_the_peer(cases: list[KernelCase]) -> None:
    case = next(case for case in cases if case.peers)
    counted = []

    def measure(calls: object) -> Sample:
        counted.append(calls())  # type: ignore[operator]
        return Sample((2e-6 * len(counted),))

    (own, beside), missing = case_figures(case, CEILINGS, measure)

    assert all(number >= 64 for number in counted)
    assert own.value == pytest.approx(2.0)
    assert own.beside == pytest.approx(case.num_bytes / 1e3)
    assert beside.ratio == pytest.approx(2.0)
    assert not missing


def test_what_is_bound_by_bytes_is_read_against_every_bandwidth(cases: list[KernelCase]) -> None:
    case = replace(cases[0], num_bytes=40_000_000, peers=())
    assert not case.is_read_only

    figures, _ = case_figures(case, CEILINGS, lambda calls: Sample((0.1,)))

    assert [figure.beside_name for figure in figures] == [
        "a copy, measured",
        "reading, measured",
        "the datasheet",
    ]
    assert [figure.ratio for figure in figures] == pytest.approx([0.2, 0.4, 0.4 / 3])


def test_a_prefill_is_read_as_a_rate_of_products(cases: list[KernelCase]) -> None:
    """40 new tokens see 1 to 40 keys, 820 pairs; in each of 4 heads two sums of 16 products."""
    case = next(case for case in cases if case.num_flops)

    (figure, beside), _ = case_figures(case, CEILINGS, lambda calls: Sample((1e-6,)))

    assert case.num_flops == 820 * 4 * (2 * 16 + 2 * 16)
    assert figure.unit == "TFLOP/s"
    assert figure.value == pytest.approx(case.num_flops / 1e-6 / 1e12)
    assert figure.ratio == pytest.approx(case.num_flops / 1e-6 / 1e12)
    assert beside.ratio == pytest.approx(1.0)


def test_a_peer_that_fails_or_computes_something_else_costs_a_note(cases: list[KernelCase]) -> None:
    def boom(index: int) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    peers = Peer("One", boom), Peer("Other", lambda i: cases[0].run(i) * 1.1)
    case = replace(cases[0], peers=peers)

    figures, missing = case_figures(case, CEILINGS, lambda calls: Sample((1e-6,)))

    assert len(figures) == 1
    assert missing == [
        f"{case.name}: One failed, RuntimeError",
        f"{case.name}: Other computes another result",
    ]


def test_a_wrong_case_costs_its_own_figures_and_no_others(cases: list[KernelCase]) -> None:
    """One wrong kernel once left a whole run on a borrowed GPU without a figure."""

    def boom(index: int) -> torch.Tensor:
        raise RuntimeError("out of resource\nand a stack")

    right = replace(cases[0], peers=())
    wrong = replace(right, name="wrong", run=lambda i: cases[0].run(i) * 1.1)
    failing = replace(right, name="failing", run=boom)

    def group() -> Iterator[KernelCase]:
        yield from (wrong, failing, right)
        raise MemoryError

    figures, notes = group_figures("group", group(), CEILINGS, lambda calls: Sample((1e-6,)))

    assert [figure.name.partition(":")[0] for figure in figures] == [right.name]
    assert notes == [
        "wrong: no figures, the result differs from plain torch's",
        "failing: no figures, RuntimeError: out of resource",
        "group: the rest is not measured, MemoryError",
    ]


def test_verifying_without_a_decode_beside_it_has_no_figure() -> None:
    assert list(verifying_figures([Figure(f"{few_rows(1024, 1)}: 1 MB", 8, "us")], [1024])) == []


def test_verifying_is_read_against_decoding() -> None:
    figures = [
        Figure(f"{few_rows(1024, rows)}: 4.19 MB", value, "us") for rows, value in ((1, 8), (5, 9))
    ]

    [figure] = verifying_figures(figures, [1024])

    assert (figure.value, figure.beside, figure.ratio) == (9, 8, 9 / 8)


@pytest.mark.parametrize("code", CODES.values(), ids=list(CODES))
def test_kv_in_few_bits_is_measured_by_its_own_bytes(cases: list[KernelCase], code: KvCode) -> None:
    found = {case.name: case for case in cases if "rows on" in case.name}
    names = [name for name in found if name.endswith(f", KV in {code.name}")]

    assert names
    for name in names:
        plain = found[name.removesuffix(f", KV in {code.name}")]
        dim = SHAPE.head_dim
        share = code.num_bytes(dim, dim) / (2 * dim * PLACE.dtype.itemsize)
        assert found[name].num_bytes == pytest.approx(plain.num_bytes * share)
        assert not found[name].peers


def test_flashinfer_is_given_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in that takes what FlashInfer's documentation says it takes."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PlainFlashInfer  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)

    found = [case for case in attention_cases(SHAPE, PLACE, 40) if "KV in" not in case.name]

    assert len(found) == 4
    for case in found:
        [peer] = [peer for peer in case.peers if peer.name == "FlashInfer"]
        assert case.is_near_twin(peer.run(0)), case.name


class PlainFlashInfer:
    """FlashInfer's paged attention of many rows, in plain torch, causal from the end of the KV."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (4, 2, 16)
        pages = [paged_kv_indices[start:end] for start, end in pairwise(paged_kv_indptr.tolist())]
        lens = [
            (len(ids) - 1) * page_size + last
            for ids, last in zip(pages, paged_kv_last_page_len.tolist(), strict=True)
        ]
        query_lens = [end - start for start, end in pairwise(qo_indptr.tolist())]
        tables = torch.stack(pages)
        self._sequences = PagedSequences(tuple(query_lens), tuple(lens), tables, page_size)
        self._scale = sm_scale

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        return paged_attention(
            q, *paged_kv_cache, self._sequences, Scoring(self._scale), "reference"
        )


def test_without_a_gpu_the_scenario_says_so_in_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    setup = BenchSetup(find_model("demo"), ModelConfig("demo"), CacheConfig(), 1, True, None)

    result = run(setup)

    assert "kernels" in NAMES
    assert scenario("kernels") is run
    assert result.refusal == "kernels run on a CUDA device, and this run has none"
    assert not result.figures
