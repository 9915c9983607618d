"""Every scenario runs on a tiny model and reports figures; their values are not meaningful."""

import functools
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvchat.bench import decode, measure, peers, prefill, startup
from kvchat.bench.engines import new_engine
from kvchat.bench.report import Result, over, print_json, print_result, record
from kvchat.bench.scenarios import DEFAULT_NAMES, scenario
from kvchat.bench.setup import BenchSetup
from kvchat.cli.bench import BenchRequest, run_bench
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import StoreError, UsageError
from kvchat.core.text import Size
from kvchat.model.checkpoint.source import find_model
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.eagle_heads import write_eagle
from support.fork_server import ForkedShell
from support.gguf_files import write_gguf
from support.matrix import spread
from support.next_heads import write_with_head

Reports = Callable[[str], Result]

FITTED = ("a token, without its context", "a thousand tokens of context")
SESSIONS = Path(__file__).parents[3] / "sessions"
SMALL = CacheConfig(device_bytes=Size(num_bytes=64 << 20))


@pytest.fixture(scope="module", autouse=True)
def _small_ceilings() -> Iterator[None]:
    """A gigabyte to read and copy, and a large product, take longer than a scenario here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_BYTES", {"cpu": 8 << 20})
        patch.setattr(measure, "_PRODUCT_SIZE", {"cpu": 256})
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = never_stopping(tiny_model("llama", max_position_embeddings=4096))
    return save_checkpoint(tmp_path_factory.mktemp("bench"), model)


def quick(checkpoint: Path, sessions: Path | None = None) -> BenchSetup:
    model = ModelConfig(str(checkpoint))
    return BenchSetup(find_model(str(checkpoint)), model, SMALL, 1, True, sessions)


@pytest.fixture(scope="module")
def report_of(checkpoint: Path) -> Reports:
    """Return what a scenario reports; each is run once, however many tests look at it."""
    return functools.cache(lambda name: scenario(name)(quick(checkpoint)))


def assert_readable(result: Result) -> None:
    out = io.StringIO()
    print_result(result, out)
    print_json([result], out)
    document = json.loads(out.getvalue().splitlines()[-1])
    [reported] = document["results"]
    assert reported["scenario"] == result.scenario
    assert document["machine"]["torch"]
    for figure in result.figures:
        assert figure.name in out.getvalue()
        assert math.isfinite(figure.value)
        # A line fitted to two tiny lengths is noise of either sign.
        assert figure.value >= 0 or figure.name in FITTED
        assert figure.ratio is None or math.isfinite(figure.ratio)


@pytest.mark.parametrize("name", sorted(set(DEFAULT_NAMES) - {"startup", "cold"}))
def test_a_scenario_reports_figures(name: str, report_of: Reports) -> None:
    result = report_of(name)

    assert not result.refusal
    assert result.figures
    assert_readable(result)


def test_in_float32_no_answer_depends_on_where_its_context_came_from(report_of):
    result = report_of("equality")

    assert [figure.name.partition(":")[0] for figure in result.figures] == [
        "cached",
        "restarted",
        "drafts",
    ]
    assert {figure.value for figure in result.figures} == {0}
    assert_readable(result)


def test_a_resumed_turn_computes_only_its_own_tokens(report_of: Reports) -> None:
    result = report_of("resume")

    [restored] = [figure for figure in result.figures if figure.name == "tokens restored"]
    assert restored.value == 128
    assert restored.ratio == 24


def test_a_chat_reads_what_is_new_and_no_more(report_of: Reports) -> None:
    result = report_of("turns")

    read = result.figures[0]
    assert read.beside is not None
    assert read.value <= read.beside + 20


def test_recorded_conversations_are_replayed(checkpoint, tmp_path, fork_server):
    ForkedShell(tmp_path, server=fork_server).run(
        "--model", str(checkpoint), "--input-format", "lines", "--max-tokens", "20",
        "--sessions-dir", str(tmp_path / "sessions"), stdin=b"one\ntwo\nthree\n",
    )  # fmt: skip

    result = scenario("replay")(quick(checkpoint, tmp_path / "sessions"))

    read, _ = result.figures
    assert "prefilled in 3 turns" in read.name
    assert read.ratio == pytest.approx(1.0, abs=0.2)
    assert_readable(result)


@pytest.mark.matrix(4)  # a file's weights are measured always, by the same code
def test_fewer_bits_are_measured_on_recorded_conversations(checkpoint, tmp_path, fork_server):
    ForkedShell(tmp_path, server=fork_server).run(
        "--model", str(checkpoint), "--max-tokens", "20", "--sessions-dir",
        str(tmp_path / "sessions"), "-p", "one two three",
    )  # fmt: skip

    result = scenario("weights")(quick(checkpoint, tmp_path / "sessions"))

    found = {figure.name: figure for figure in result.figures}
    assert found["int8: perplexity"].ratio == pytest.approx(1.0, abs=0.05)
    assert found["int4: perplexity"].ratio == pytest.approx(1.0, abs=0.6)
    assert found["int8: perplexity"].ratio != 1.0
    sizes = [found[f"{form}: weights"].value for form in ("auto", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    lost = [found[f"{form}: KL to float32"].value for form in ("auto", "int8", "int4")]
    assert lost[0] < lost[1] < lost[2]
    assert found["auto: top-1 as float32"].value == 100
    assert_readable(result)


def test_a_gguf_file_is_measured_beside_the_model_on_the_same_tokens(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        path = write_gguf(tmp_path / "m-Q8_0.gguf", model, "Q8_0")
    setup = replace(quick(checkpoint, SESSIONS), gguf=path)

    found = {figure.name: figure for figure in scenario("weights")(setup).figures}

    assert found["m-Q8_0: perplexity"].ratio == pytest.approx(1.0, abs=0.01)
    assert found["m-Q8_0: weights"].value < found["auto: weights"].value


@pytest.mark.parametrize("name", spread(["decode", "prefill"], ["prefill"]))
def test_a_gguf_file_is_measured_as_the_model(name, tmp_path, monkeypatch):
    """transformers, the peer, once looked for a checkpoint in the file's directory, and llama.cpp
    was not run: the same model was to be given as GGUF.
    """
    model = tiny_model("llama", hidden_size=64, intermediate_size=64, max_position_embeddings=512)
    with torch.inference_mode():
        path = write_gguf(tmp_path / "m-Q4_0.gguf", model, "Q4_0")
    setup = BenchSetup(find_model(str(path)), ModelConfig(), SMALL, 1, True, None)
    monkeypatch.setattr(OtherPeer, "vocab_size", 1000, raising=False)
    monkeypatch.setattr(peers, "LlamaCpp", OtherPeer)
    monkeypatch.setitem(sys.modules, "llama_cpp", installed("llama_cpp"))

    result = scenario(name)(setup)

    assert not result.refusal
    assert any("transformers" in figure.beside_name for figure in result.figures)
    assert any(figure.beside_name == "llama.cpp" for figure in result.figures)
    assert "llama.cpp: m-Q4_0.gguf" in result.notes


def test_a_tokens_time_is_fitted_by_its_context(report_of: Reports) -> None:
    result = report_of("decode")

    names = [figure.name for figure in result.figures]
    assert "a token, without its context" in names
    assert "a thousand tokens of context" in names
    assert any("llama.cpp: not run" in note for note in result.notes)
    [sampled] = [figure for figure in result.figures if "sampled" in figure.name]
    assert sampled.beside_name == "greedy"
    assert sampled.ratio == pytest.approx(sampled.value / (sampled.beside or 0.0))


def test_coded_kv_is_measured_beside_the_models_own(report_of: Reports) -> None:
    result = report_of("kv")

    assert not result.refusal
    found = {figure.name: figure for figure in result.figures}
    for code, num_bytes in (("int8", 18), ("fp8", 18), ("k8v4", 14), ("int4", 10)):
        # A head's 16 numbers of float32 take 64 bytes; in 8 bits 18, with their scale.
        assert found[f"{code}: KV of a token"].ratio == pytest.approx(num_bytes / 64)
        assert found[f"{code}: context 128"].value > 0
        assert found[f"{code}: context 32"].beside_name == "KV in float32"
    assert found["SnapKV 25%: context 128"].beside_name == "all KV"
    assert_readable(result)


@pytest.mark.matrix  # the engine's test has the same measurement on fewer tokens
def test_what_coded_kv_does_to_predictions_is_measured() -> None:
    setup = BenchSetup(find_model("demo"), ModelConfig("demo"), SMALL, 1, True, SESSIONS)
    result = scenario("kv")(setup)

    found = {figure.name: figure for figure in result.figures}
    assert found["int8: perplexity"].ratio == pytest.approx(1, abs=0.02)
    assert found["int8: top-1 as plain KV"].value > 90
    assert found["int8: perplexity of the text"].ratio == pytest.approx(1, abs=0.02)
    assert found["int8: other answers"].value <= 5
    assert found["int8: other answers"].unit == "of 100"
    in_one = found["int8: facts recalled over one alone"]
    assert in_one.value <= found["int8: other answers"].value
    assert found["int8: recall at 80 to 100 %"].beside is not None
    assert {found[f"{rule} 50%: recall"].unit for rule in ("SnapKV", "KVzip", "H2O")} == {"of 20"}
    # The demo is small: what 4 bits would do is a note.
    assert any("would answer otherwise. KV in k8v4 changes" in note for note in result.notes)
    assert not any(name.startswith("k8v4") for name in found)


def test_kv_of_8_bits_has_no_figures_where_it_does_not_work(tmp_path: Path) -> None:
    model = tiny_model("mamba")
    source = find_model(str(save_checkpoint(tmp_path, model)))
    setup = BenchSetup(source, ModelConfig(str(tmp_path)), SMALL, 1, True)

    assert "int8 does not work" in scenario("kv")(setup).refusal


def test_an_eagle_head_is_timed_with_an_oracles_tokens(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_eagle(tmp_path / "head", model)
    save_checkpoint(tmp_path, model)
    (tmp_path / "tokenizer.json").unlink()
    source, head = find_model(str(tmp_path)), find_model(str(tmp_path / "head"))
    setup = BenchSetup(source, ModelConfig(dtype="float32"), SMALL, 1, True, draft=head)

    result = scenario("spec")(setup)

    found = {figure.name: figure for figure in result.figures}
    assert found["head, simulated 0.75"].value > 0
    assert result.settings["draft"] == "ngram and draft"


def test_requests_together_generate_what_they_do_one_after_another(report_of: Reports) -> None:
    """The lengths are the same, so the ratio of the rates is that of the times."""
    result = report_of("concurrency")

    rates, seconds = result.figures
    assert_readable(result)
    assert rates.ratio is not None
    assert seconds.ratio is not None
    assert rates.ratio == pytest.approx(1 / seconds.ratio)


def test_what_is_moved_is_read_against_every_ceiling(checkpoint: Path, report_of: Reports) -> None:
    """A token reads the weights once, all but the table of embeddings, and its KV once."""
    result = report_of("decode")

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    streamed = sum(parameter.nbytes for parameter in model.parameters())
    streamed -= model.get_input_embeddings().weight.nbytes
    [rate] = {f.value for f in result.figures if f.name == "context 32"}
    moved = [f for f in result.figures if f.name.startswith("context 32: ")]
    assert [f.beside_name for f in moved] == ["reading, measured", "a copy, measured"]
    for figure in moved:
        assert figure.value > rate * streamed / 1e9
        assert figure.value == pytest.approx(rate * streamed / 1e9, rel=0.5)
        assert figure.ratio == pytest.approx(figure.value / (figure.beside or 0.0))


def test_a_prompts_products_are_counted_as_naively(checkpoint: Path) -> None:
    assembled = new_engine(find_model(str(checkpoint)), ModelConfig(str(checkpoint)), SMALL)
    module, layers = assembled.loaded.module, assembled.loaded.spec.layers
    head = module.get_output_embeddings().weight
    weights = sum(p.numel() for n, p in module.named_parameters() if p.ndim == 2)
    weights -= module.get_input_embeddings().weight.numel() + head.numel()

    naive = 2 * head.numel()
    for position in range(9):
        naive += 2 * weights
        naive += sum(
            2 * (position + 1) * each.num_heads * (each.key_dim + each.value_dim) for each in layers
        )
    assert prefill.num_flops(assembled, 9) == naive


def test_a_report_is_kept_under_the_devices_name(checkpoint: Path, tmp_path: Path) -> None:
    """There was no way to keep what a GPU showed but to copy it from the terminal."""
    result = scenario("radix")(quick(checkpoint))

    text, data = record([result], tmp_path / "new", torch.device("cpu"), "kvchat bench radix")

    document = json.loads(data.read_text())
    assert text.with_suffix(".json") == data
    assert data.parent == tmp_path / "new"
    assert document["command"] == "kvchat bench radix"
    maker, *_ = re.findall("[a-z0-9]+", document["machine"]["processor"].lower())
    assert data.name.startswith(maker)
    assert document["results"] == [json.loads(json.dumps(asdict(result)))]
    page = text.read_text()
    assert "$ kvchat bench radix\n" in page
    assert all(figure.name in page for figure in result.figures)
    assert f"torch {torch.__version__}" in page


def test_a_report_that_cannot_be_kept_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreError, match="cannot be written"):
        record([], tmp_path / "file", torch.device("cpu"), "kvchat bench")


RADIX = BenchRequest(
    scenarios=("radix",),
    model=None,
    shape="tiny",
    dtype="float32",
    weights="auto",
    device="cpu",
    device_cache="64M",
    block_size=16,
    threads=None,
    repeats=1,
    is_quick=True,
    sessions=None,
    gguf=None,
    record=None,
)


def test_a_report_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, capsys):
    """An hour's figures were lost to the reader of the document, for a mistyped directory."""
    (tmp_path / "file").touch()
    request = replace(RADIX, record=tmp_path / "file")

    with pytest.raises(StoreError, match="cannot be written"):
        run_bench(request)

    assert not capsys.readouterr().out


def test_a_report_has_what_was_measured_before_an_interruption(tmp_path, monkeypatch):
    """A limit of time ended the third scenario, and the figures of two were lost."""

    def interrupted(setup: BenchSetup) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(prefill, "run", interrupted)
    request = replace(RADIX, scenarios=("radix", "prefill"), record=tmp_path)

    with pytest.raises(KeyboardInterrupt):
        run_bench(request)

    [data] = tmp_path.glob("*.json")
    assert [each["scenario"] for each in json.loads(data.read_text())["results"]] == ["radix"]


def installed(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


class OtherPeer:
    """Stands in for llama.cpp with a file of another number of tokens than the model beside it."""

    vocab_size: int

    name = "llama.cpp"

    def __init__(self, path: Path, num_threads: int) -> None:
        pass

    def decode_rate(self, prompt_ids: Sequence[int], max_tokens: int) -> float:
        assert max(prompt_ids) < self.vocab_size
        return 1.0

    def prefill_s(self, prompt_ids: Sequence[int]) -> float:
        assert max(prompt_ids) < self.vocab_size
        return 1.0


@pytest.mark.parametrize(
    ("measured", "vocab_size"),
    spread(
        [(measured, size) for measured in (decode, prefill) for size in (20, 1_000_000)],
        always=[(decode, 20), (prefill, 1_000_000)],
    ),
)
def test_a_peer_of_more_or_fewer_tokens_is_asked_what_both_know(
    measured: Any, vocab_size: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens were the model's as well, which refused them: no scenario reported anything."""
    monkeypatch.setattr(OtherPeer, "vocab_size", vocab_size, raising=False)
    monkeypatch.setattr(peers, "LlamaCpp", OtherPeer)
    monkeypatch.setitem(sys.modules, "llama_cpp", installed("llama_cpp"))

    result = measured.run(replace(quick(checkpoint), gguf=Path("model.gguf")))

    assert [figure.beside for figure in result.figures if figure.beside_name == "llama.cpp"]


@pytest.mark.parametrize("measured", [decode, prefill])
def test_a_llama_bench_runs_beside(measured: Any, checkpoint: Path, tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text("#!/bin/sh\necho 'loading'\necho '[{\"avg_ts\": 200.0}]'\n")
    program.chmod(0o700)
    setup = replace(quick(checkpoint), gguf=Path("model.gguf"), peer=program)

    result = measured.run(setup)

    rates = [figure.beside for figure in result.figures if figure.beside_name == "llama-bench"]
    assert rates
    assert rates == pytest.approx([200.0] * len(rates))


def test_a_peer_that_does_not_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="measured nothing"):
        peers.LlamaBench(tmp_path / "missing", Path("model.gguf"), 2).prefill_s([1, 2])


def test_a_peers_perplexity_is_of_every_token_but_the_first(monkeypatch):
    class Llama:
        def __init__(self, path: str, n_ctx: int, **how: object) -> None:
            assert how["logits_all"]
            self.scores = np.zeros((n_ctx, 5), np.float32)

        def n_vocab(self) -> int:
            return 5

        def reset(self) -> None:
            pass

        def eval(self, token_ids: list[int]) -> None:
            for place, following in enumerate(token_ids[1:]):
                self.scores[place] = 0
                self.scores[place, following] = np.log(16)  # 16 of 20

    llama_cpp = installed("llama_cpp")
    llama_cpp.Llama = Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp)

    value = peers.LlamaCpp(Path("model.gguf"), 1, num_logits=4).perplexity([[1, 2, 3, 4], [4, 0]])

    assert value == pytest.approx(20 / 16)


def test_the_command_keeps_a_report_where_it_is_told_to(tmp_path, fork_server):
    home = tmp_path / "home"
    home.mkdir()

    done = ForkedShell(home, server=fork_server).run(
        "bench", "radix", "--shape", "tiny", "--quick", "--repeats", "1", "--record", "reports"
    )

    assert done.returncode == 0, done.stderr
    [data] = (home / "reports").glob("*.json")
    assert json.loads(data.read_text())["command"].startswith("kvchat bench radix --shape tiny")
    assert data.with_suffix(".md").exists()
    assert data.name in done.stderr.decode()


def test_a_device_that_is_not_there_is_told_before_anything_is_made_for_it(tmp_path, fork_server):
    """Sixteen gigabytes of random weights were written first."""
    done = ForkedShell(tmp_path, server=fork_server).run(
        *("bench", "kernels", "--shape", "8b", "--device", "cuda"),
        TMPDIR=str(tmp_path / "nowhere"),
        CUDA_VISIBLE_DEVICES="",
    )

    assert done.returncode == 3
    assert b"no usable CUDA device" in done.stderr


def test_nothing_to_replay_is_said(checkpoint: Path, tmp_path: Path) -> None:
    result = scenario("replay")(quick(checkpoint, tmp_path))

    assert "no sessions" in result.refusal
    assert_readable(result)


def test_an_unknown_scenario_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match="no scenario"):
        scenario("speed")


def test_the_first_prompt_of_a_process_is_beside_later_ones(checkpoint, monkeypatch):
    """Here all are in this process; `test_progress` has functions in processes of their own."""
    monkeypatch.setattr(startup, "in_a_process", lambda run, *given: run(*given))

    first, loading = startup.figures(quick(checkpoint))

    assert first.value > 0
    assert first.beside is not None
    assert first.ratio == pytest.approx(first.value / first.beside)
    assert loading.value > 0


def test_drafts_are_measured_by_category(checkpoint: Path) -> None:
    result = scenario("spec")(quick(checkpoint))
    assert_readable(result)
    names = {figure.name for figure in result.figures}
    assert {"coding", "retrieval", "writing", "reasoning", "unguessable"} <= names


def test_a_head_for_the_next_token_is_measured_with_simulated_tokens(tmp_path: Path) -> None:
    write_with_head(tmp_path, "qwen3_5, compiled")
    for path in tmp_path.glob("*token*"):
        path.unlink()
    result = scenario("spec")(quick(tmp_path))
    [figure] = [each for each in result.figures if each.name == "head, simulated 0.75"]
    assert figure.must == "1.3"  # a head pays in no model that is as small as this one


def test_a_figure_beside_nothing_has_no_ratio() -> None:
    """Beside 0 it was NaN, and the record was no JSON."""
    figure = over("accepted", 0.5, "", ("none", 0.0), must="1")
    assert (figure.beside, figure.ratio, figure.ratio_name, figure.must) == (0.0, None, "", "1")
    assert over("accepted", 0.5, "", ("half", 0.5)).ratio == 1.0
