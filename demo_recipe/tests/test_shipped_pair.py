"""The shipped pair does what its card says; the slow tests measure its scores anew."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from demo_recipe.card import write_card
from demo_recipe.evaluate import evaluate_pair
from demo_recipe.manifest import FOLDERS, digests
from demo_recipe.paths import DRAFT, HOME, MANIFEST, TARGET
from demo_recipe.plans import FULL, HISTORY
from demo_recipe.talkers import ModelTalker


def test_the_target_greets_and_ends_its_reply() -> None:
    talker = ModelTalker.load(TARGET)

    reply = talker.reply([[{"role": "user", "content": "Hello!"}]])[0]

    assert reply.is_finished
    assert "hello" in reply.text.lower()


def test_the_shipped_files_are_those_that_the_manifest_lists() -> None:
    assert digests(HOME) == json.loads(MANIFEST.read_text())["files"]


def test_the_plans_are_those_that_made_the_shipped_weights() -> None:
    made = json.loads(MANIFEST.read_text())["made"]

    assert made["history"] == HISTORY.strip()
    assert list(made["stages"]) == [stage.name for stage in FULL.stages]
    for stage in FULL.stages:
        recorded, plan = made["stages"][stage.name], stage.plan
        assert recorded["after"] == pytest.approx(dict(stage.after), abs=1e-4)
        assert recorded["teacher"] == pytest.approx(dict(stage.teacher), abs=1e-4)
        assert recorded["seed"] == plan.seed
        assert recorded["steps"] == plan.num_steps
        assert recorded["geometry"] == asdict(plan.geometry)
    for role, shares in FULL.shipped.items():
        assert made["shipped"][role] == pytest.approx(dict(shares), abs=1e-4)


def test_the_cards_are_those_that_the_manifest_gives(tmp_path: Path) -> None:
    manifest = json.loads(MANIFEST.read_text())
    for role in FOLDERS:
        (tmp_path / role).mkdir()
        (tmp_path / role / "model.safetensors").symlink_to(HOME / role / "model.safetensors")

    write_card(tmp_path, manifest["scores"], manifest["made"])

    for role in FOLDERS:
        assert (tmp_path / role / "README.md").read_text() == (
            HOME / role / "README.md"
        ).read_text()


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The pair measured anew, as the manifest's scores were."""
    recorded = json.loads(MANIFEST.read_text())["scores"]["tests"]
    count = max(grade["probes"] for grade in recorded["kvchat"].values())
    return evaluate_pair(TARGET, DRAFT, count).as_json()


@pytest.mark.soak
def test_the_recorded_scores_can_be_measured_again(measured: dict[str, Any]) -> None:
    """Arithmetic differs a little between machines; one reply in ten may fall otherwise."""
    recorded = json.loads(MANIFEST.read_text())["scores"]

    for test, grades in recorded["tests"].items():
        for grade, cell in grades.items():
            again = measured["tests"][test][grade]
            assert again["probes"] == cell["probes"]
            assert again["rate"] == pytest.approx(cell["rate"], abs=0.1), (test, grade)
    assert measured["ends by itself"]["rate"] == pytest.approx(
        recorded["ends by itself"]["rate"], abs=0.01
    )
    for grade, numbers in recorded["speculation"].items():
        length = measured["speculation"][grade]["mean acceptance length"]
        assert length == pytest.approx(numbers["mean acceptance length"], abs=0.2)
