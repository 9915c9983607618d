"""Every scenario runs on a tiny model and reports figures that can be read, not quoted."""

import io
import json
import math
from pathlib import Path

import pytest

from kvchat.bench.report import Result, print_json, print_result
from kvchat.bench.scenarios import DEFAULT_NAMES, BenchSetup, scenario
from kvchat.core.config import CacheConfig, ModelConfig, Size
from kvchat.core.errors import UsageError
from kvchat.model.source import find_model
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.commands import Shell

SMALL = CacheConfig(device_bytes=Size(num_bytes=64 << 20))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = never_stopping(tiny_model("llama", max_position_embeddings=4096))
    return save_checkpoint(tmp_path_factory.mktemp("bench"), model)


def quick(checkpoint: Path, sessions: Path | None = None) -> BenchSetup:
    model = ModelConfig(str(checkpoint))
    return BenchSetup(find_model(str(checkpoint)), model, SMALL, 1, True, sessions)


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
        # A slope fitted to tiny lengths is noise of either sign.
        assert figure.value >= 0 or figure.name == "a thousand tokens of context"
        assert figure.ratio is None or math.isfinite(figure.ratio)


@pytest.mark.parametrize("name", sorted(set(DEFAULT_NAMES) - {"startup"}))
def test_a_scenario_reports_figures(name: str, checkpoint: Path) -> None:
    result = scenario(name)(quick(checkpoint))

    assert not result.refusal
    assert result.figures
    assert_readable(result)


def test_a_resumed_turn_computes_only_its_own_tokens(checkpoint: Path) -> None:
    result = scenario("resume")(quick(checkpoint))

    [restored] = [figure for figure in result.figures if figure.name == "tokens restored"]
    assert restored.value == 128
    assert restored.ratio == 24


def test_a_chat_reads_what_is_new_and_no_more(checkpoint: Path) -> None:
    result = scenario("turns")(quick(checkpoint))

    read = result.figures[0]
    assert read.beside is not None
    assert read.value <= read.beside + 20


def test_recorded_conversations_are_replayed(checkpoint: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    shell = Shell(home)
    shell.run(
        "--model", str(checkpoint), "--input-format", "lines", "--max-tokens", "20",
        "--sessions-dir", str(tmp_path / "sessions"), stdin=b"one\ntwo\nthree\n",
    )  # fmt: skip

    result = scenario("replay")(quick(checkpoint, tmp_path / "sessions"))

    read, _ = result.figures
    assert "read in 3 turns" in read.name
    assert read.ratio == pytest.approx(1.0, abs=0.2)
    assert_readable(result)


def test_fewer_bits_are_measured_on_recorded_conversations(
    checkpoint: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    Shell(home).run(
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
    assert_readable(result)


def test_a_tokens_time_is_fitted_by_its_context(checkpoint: Path) -> None:
    result = scenario("decode")(quick(checkpoint))

    names = [figure.name for figure in result.figures]
    assert "a token, without its context" in names
    assert "a thousand tokens of context" in names
    assert any("llama.cpp: not run" in note for note in result.notes)


def test_nothing_to_replay_is_said(checkpoint: Path, tmp_path: Path) -> None:
    result = scenario("replay")(quick(checkpoint, tmp_path))

    assert "no sessions" in result.refusal
    assert_readable(result)


def test_an_unknown_scenario_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match="no scenario"):
        scenario("speed")
