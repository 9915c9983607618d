"""Outcomes of the race survive the process, and nothing that a file says is believed unseen."""

import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest

from kvchat.model.linear_race import ROW_BUCKETS, LinearShape, Outcome
from kvchat.model.linear_race_memory import RaceMemory

SHAPE = LinearShape(4096, 12288, "bfloat16", False)
BIASED = LinearShape(4096, 12288, "bfloat16", True)
SOME = {
    (SHAPE, 1): Outcome(2e-5, 1e-5),
    (BIASED, 16): Outcome(refusal="it computes other numbers than torch"),
}
FILE = "linear_race.json"


def test_outcomes_are_those_that_were_kept(tmp_path: Path) -> None:
    RaceMemory(tmp_path / "state", "H200").write(SOME)

    assert RaceMemory(tmp_path / "state", "H200").read() == SOME
    assert stat.S_IMODE((tmp_path / "state" / FILE).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "state").iterdir()] == [FILE]


def test_machines_do_not_share_outcomes(tmp_path: Path) -> None:
    RaceMemory(tmp_path, "H200, torch 2.11").write(SOME)
    other = RaceMemory(tmp_path, "H200, torch 2.13")

    assert other.read() == {}
    other.write({(SHAPE, 1): Outcome(1.0, 3.0)})
    assert RaceMemory(tmp_path, "H200, torch 2.11").read() == SOME


def test_models_of_one_machine_add_up(tmp_path: Path) -> None:
    RaceMemory(tmp_path, "H200").write(SOME)
    RaceMemory(tmp_path, "H200").write({(SHAPE, 2): Outcome(1.0, 3.0)})

    assert RaceMemory(tmp_path, "H200").read() == {**SOME, (SHAPE, 2): Outcome(1.0, 3.0)}


def test_any_outcomes_come_back_as_they_were(tmp_path: Path) -> None:
    choose = random.Random(7)
    outcomes = {}
    for _ in range(300):
        dtype = choose.choice(("float32", "float16", "bfloat16"))
        sizes = choose.randint(1, 999_999_999), choose.randint(1, 999_999_999)
        shape = LinearShape(*sizes, dtype, choose.random() < 0.5)
        times = choose.uniform(1e-9, 1.0), choose.uniform(1e-9, 1.0)
        outcome = Outcome(*times) if choose.random() < 0.8 else Outcome(refusal='"\n\u2028é')
        outcomes[shape, choose.choice(ROW_BUCKETS)] = outcome
    RaceMemory(tmp_path, "H200").write(outcomes)

    assert RaceMemory(tmp_path, "H200").read() == outcomes


def test_a_file_of_as_much_as_is_kept_can_be_read(tmp_path: Path) -> None:
    refused = Outcome(refusal="x" * 140)
    for machine in range(20):
        outcomes = {
            (LinearShape(100_000_000 + i, 100_000_000, "bfloat16", True), 16): refused
            for i in range(1100)
        }
        RaceMemory(tmp_path, f"GPU {machine}").write(outcomes)

    assert len(RaceMemory(tmp_path, "GPU 19").read()) == 1000
    assert len(RaceMemory(tmp_path, "GPU 4").read()) == 1000
    assert RaceMemory(tmp_path, "GPU 3").read() == {}


NAME = "4096x12288 bfloat16, 1 rows"


@pytest.mark.parametrize(
    "outcomes",
    [
        {NAME: [1.0]},
        {NAME: [1.0, -1.0]},
        {NAME: [1.0, float("nan")]},
        {NAME: ["1", "2"]},
        {NAME: ""},
        {NAME: None},
        {"4096x12288 bfloat16, 3 rows": [1.0, 2.0]},
        {"4096 bfloat16, 1 rows": [1.0, 2.0]},
        [NAME],
        17,
        None,
    ],
    ids=str,
)
def test_what_no_outcome_can_be_is_left_out(outcomes: Any, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"version": 1, "machines": {"H200": outcomes}}))
    memory = RaceMemory(tmp_path, "H200")

    assert memory.read() == {}
    memory.write(SOME)
    assert memory.read() == SOME


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "null", '{"version": 2, "machines": {"H200": {}}}', '{"version": 1}',
        '{"version": 1, "machines": 3}', '{"version": 1, "machines": null}', "[" * 200_000,
        "\ud800",
    ],
    ids=range(10),
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_as_good_as_none(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(content.encode("utf-8", "surrogatepass"))
    memory = RaceMemory(tmp_path, "H200")

    assert memory.read() == {}
    memory.write(SOME)
    assert memory.read() == SOME


def test_a_directory_that_cannot_be_used_costs_nothing_but_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    memory = RaceMemory(tmp_path / "file", "H200")

    memory.write(SOME)

    assert memory.read() == {}


def test_without_a_directory_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = RaceMemory(None, "H200")

    memory.write(SOME)

    assert memory.read() == {}
    assert not list(tmp_path.iterdir())
