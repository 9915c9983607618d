"""The recipe from nothing to a pair, tiny: it finishes, resumes, and tells how it was made."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demo_recipe import mixes, plans
from demo_recipe.checkpoint import Reached, load_network, reached
from demo_recipe.manifest import digests, renew_scores
from demo_recipe.network import Geometry, Network
from demo_recipe.plans import FULL, Recipe, Stage
from demo_recipe.recipe import UNTOLD, Build, _tokenizer, _train_stage, adopt, build
from demo_recipe.team import Team, run_team
from demo_recipe.train import Phase, Plan

GEOMETRY = Geometry(plans.VOCAB_SIZE, 32, 48, 2, 2, 1, head_dim=16)
SPEED = {"batch_tokens": 1024, "leg_steps": 2, "warmup_steps": 1}


def tiny(name: str, num_legs: int, num_layers: int = 1) -> Plan:
    geometry = replace(GEOMETRY, num_hidden_layers=num_layers)
    return Plan(name, geometry, (Phase(mixes.FIRST_STEPS, num_legs),), **SPEED)


FIRST = Stage(tiny("target", 2, num_layers=2))
TINY = Recipe(
    stages=(
        FIRST,
        Stage(tiny("draft", 1)),
        Stage(tiny("distillation", 1), after={"draft": 1.0}, teacher={"target": 1.0}),
        Stage(tiny("target-2", 1, num_layers=2), after={"target": 1.0}),
    ),
    shipped={"target": {"target": 0.25, "target-2": 0.75}, "draft": {"distillation": 1.0}},
    num_tokenizer_chats=300,
    num_probes=1,
    tests=("kvchat",),
)


def job(folder: Path, recipe: Recipe = TINY) -> Build:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return Build(recipe, work, folder / "pair", num_workers=1, is_compiled=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    build(job(folder))
    return folder


def test_the_pair_is_complete_and_shares_its_tokenizer(built: Path) -> None:
    files = {path.name for path in (built / "pair" / "target").iterdir()}

    assert files == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    target, draft = (built / "pair" / name / "tokenizer.json" for name in ("target", "draft"))
    assert target.read_bytes() == draft.read_bytes()


def test_the_manifest_and_the_card_tell_what_was_done(built: Path) -> None:
    manifest = json.loads((built / "pair" / "manifest.json").read_text())
    card = (built / "pair" / "target" / "README.md").read_text()

    assert manifest["files"] == digests(built / "pair")
    assert manifest["made"]["stages"]["target"]["steps"] == FIRST.plan.num_steps
    assert manifest["made"]["stages"]["target-2"]["after"] == {"target": 1.0}
    assert manifest["made"]["stages"]["distillation"]["teacher"] == {"target": 1.0}
    assert f"took {len(TINY.stages)} stages" in card
    assert "apache-2.0" in card
    assert "| kvchat |" in card


def test_a_later_report_renews_its_scores_and_no_weight(built: Path, tmp_path: Path) -> None:
    """Commands came after the pair was built: its card said 89% of questions, and 78% were left."""
    pair = shutil.copytree(built / "pair", tmp_path / "pair")
    before = json.loads((pair / "manifest.json").read_text())
    cell = {"rate": 0.784, "good": 98, "probes": 125}
    report = {
        "tests": {"kvchat": {"known": cell, "unseen": cell}},
        "ends by itself": {"rate": 1.0, "finished": 1, "replies": 1},
        "speculation": None,
    }

    renew_scores(pair, report, "2031-01-02")

    after = json.loads((pair / "manifest.json").read_text())
    card = (pair / "target" / "README.md").read_text()
    assert after["scores"]["tests"]["kvchat"]["known"] == cell
    assert "| kvchat | 78.4% | 98% | 78.4% | 80% | 125 + 125 |" in card
    assert "Measured anew on 2031-01-02: kvchat." in card
    for kept in ("ends by itself", "speculation"):  # the report is not of all tests
        assert after["scores"][kept] == before["scores"][kept]
    handwritten = after["scores"]["tests"]["handwritten"]
    assert handwritten == before["scores"]["tests"]["handwritten"]
    assert after["made"] == before["made"]
    assert after["files"] == digests(pair)
    changed = {name for name in after["files"] if after["files"][name] != before["files"][name]}
    assert changed == {"target/README.md", "draft/README.md"}


def test_building_again_trains_nothing_and_changes_no_weight(built: Path) -> None:
    before = digests(built / "pair")["target/model.safetensors"]

    build(job(built))

    assert digests(built / "pair")["target/model.safetensors"] == before
    assert reached(built / "work" / "target").next_leg == FIRST.plan.num_legs


def test_a_run_cut_short_resumes_to_the_same_weights(built: Path, tmp_path: Path) -> None:
    # The schedule reads the whole plan, so the first half runs under the full plan too.
    half = job(tmp_path)
    _tokenizer(half)
    with pytest.raises(_Cut):
        _train_stage(half, FIRST, _CutTeam(after_waits=1))
    assert reached(half.work / "target").next_leg == 1

    _train_stage(half, FIRST, Team())

    whole, resumed = (
        load_file(folder / "target" / "model.safetensors") for folder in (built / "work", half.work)
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


class _Cut(Exception):
    pass


class _CutTeam(Team):
    """A team of one that is killed at its n-th meeting, right after a checkpoint."""

    def __init__(self, after_waits: int) -> None:
        super().__init__()
        self._left = after_waits

    def wait(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise _Cut


def test_a_team_of_two_averages_and_stays_together(tmp_path: Path) -> None:
    run_team(2, functools.partial(_average_and_write, tmp_path))

    one, two = (torch.tensor(json.loads((tmp_path / str(rank)).read_text())) for rank in (0, 1))
    assert torch.equal(one, two)
    assert one.tolist() == [1.5, 3.0, 0.5]


def _average_and_write(folder: Path, team: Team) -> None:
    gradients = [torch.tensor([1.0, 2.0]) * (team.rank + 1), torch.tensor([float(team.rank)])]
    team.average(gradients)
    team.wait()
    (folder / str(team.rank)).write_text(json.dumps(torch.cat(gradients).tolist()))


def test_a_checkpoint_of_another_shape_is_refused(built: Path) -> None:
    other = Stage(tiny("target", 2, num_layers=3))

    with pytest.raises(ValueError, match="holds another geometry"):
        _train_stage(job(built), other, Team())


def test_a_second_round_starts_from_the_first_and_moves_away(built: Path) -> None:
    first, second = (load_network(built / "work" / name) for name in ("target", "target-2"))
    fresh = Network(first.geometry, seed=TINY.stages[3].plan.seed)

    moved, away = (_distance(second, other) for other in (first, fresh))

    assert 0 < moved < away


def _distance(one: Network, other: Network) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum(float((left - right).detach().square().sum()) for left, right in pairs)


def test_a_built_pair_stands_for_the_first_round(built: Path, tmp_path: Path) -> None:
    pair = shutil.copytree(built / "pair", tmp_path / "earlier")
    manifest = json.loads((pair / "manifest.json").read_text())
    assert manifest["made"]["history"] == UNTOLD
    manifest["made"]["history"] = "The first round learnt otherwise."
    (pair / "manifest.json").write_text(json.dumps(manifest))
    later = job(tmp_path)

    adopt(later, pair, before="target-2")
    build(later)

    made = json.loads((tmp_path / "pair" / "manifest.json").read_text())["made"]
    assert made["stages"]["target-2"]["steps"] == 2
    assert made["history"] == "The first round learnt otherwise."
    adopted, shipped = (load_network(built / "pair" / "target"), later.work / "target")
    assert _distance(load_network(shipped), adopted) == 0
    assert (
        digests(tmp_path / "pair")["target/model.safetensors"]
        != (digests(built / "pair")["target/model.safetensors"])
    )


@pytest.mark.parametrize("recipe", [FULL, TINY], ids=["full", "tiny"])
def test_every_stage_needs_earlier_stages_only(recipe: Recipe) -> None:
    names = [stage.name for stage in recipe.stages]

    assert len(set(names)) == len(names)
    for number, stage in enumerate(recipe.stages):
        assert {*stage.after, *stage.teacher} <= set(names[:number])
    assert {name for parts in recipe.shipped.values() for name in parts} <= set(names)
    means = [*recipe.shipped.values(), *(s.after for s in recipe.stages if s.after)]
    assert [sum(mean.values()) for mean in means] == pytest.approx([1.0] * len(means))


def test_the_shipped_target_is_the_mean_of_both_rounds(built: Path) -> None:
    first, second, shipped = (
        load_network(folder).state_dict()
        for folder in (
            built / "work" / "target", built / "work" / "target-2", built / "pair" / "target",
        )
    )  # fmt: skip

    for name, weight in shipped.items():
        mean = 0.25 * first[name] + 0.75 * second[name]
        assert torch.equal(weight, mean.to(torch.bfloat16).float()), name


def test_nothing_trained_is_nothing_reached(tmp_path: Path) -> None:
    assert reached(tmp_path / "none") == Reached()


def test_the_rate_warms_up_stays_and_falls_to_almost_nothing() -> None:
    plan = replace(FIRST.plan, leg_steps=40, warmup_steps=10, flat_share=0.5)
    scales = [plan.scale(step) for step in range(plan.num_steps)]

    assert scales[0] == pytest.approx(0.1)
    assert max(scales) == 1.0
    assert scales[plan.num_steps // 2] == 1.0
    assert scales[-1] < 0.05


def test_the_rate_follows_its_knots() -> None:
    plan = replace(FIRST.plan, leg_steps=40, warmup_steps=1, knots=((0, 1.0), (10, 1.0), (80, 0.3)))

    assert [plan.scale(step) for step in (0, 9, 10, 45)] == pytest.approx([1.0, 1.0, 1.0, 0.65])
