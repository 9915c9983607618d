"""The recipe from nothing to a pair, tiny: it finishes, resumes, and tells how it was made."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demo_recipe import mixes, plans
from demo_recipe.checkpoint import load_network, reached
from demo_recipe.manifest import digests, renew_scores
from demo_recipe.network import Geometry, Network, Rows
from demo_recipe.optimiser import product_dtype
from demo_recipe.plans import FULL, Recipe, Stage
from demo_recipe.recipe import Build, build, train_stage
from demo_recipe.tokenizer import ChatTokenizer
from demo_recipe.train import Phase, Plan, train

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
    return Build(recipe, work, folder / "pair")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    build(job(folder))
    return folder


def test_the_pair_is_complete_and_its_papers_tell_what_was_done(built: Path) -> None:
    pair = built / "pair"
    assert {path.name for path in (pair / "target").iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    target, draft = (pair / name / "tokenizer.json" for name in ("target", "draft"))
    assert target.read_bytes() == draft.read_bytes()
    manifest = json.loads((pair / "manifest.json").read_text())
    made = manifest["made"]["stages"]
    assert manifest["files"] == digests(pair)
    assert made["target"]["steps"] == FIRST.plan.num_steps
    assert made["target-2"]["after"] == made["distillation"]["teacher"] == {"target": 1.0}
    card = (pair / "target" / "README.md").read_text()
    for words in (f"took {len(TINY.stages)} stages", "apache-2.0", "| kvchat |"):
        assert words in card


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
    whole, half = built / "work", tmp_path / "target"
    tokenizer, losses = ChatTokenizer.load(whole / "tokenizer"), itertools.count()

    def loss(network: Network, rows: Rows) -> torch.Tensor:
        if next(losses) == FIRST.plan.leg_steps:
            raise KeyboardInterrupt
        return network.loss(rows, product_dtype(torch.device("cpu")))

    with pytest.raises(KeyboardInterrupt):
        train(FIRST.plan, tokenizer, half, None, loss)
    assert reached(half).next_leg == 1

    train(FIRST.plan, tokenizer, half, None, loss)

    weights, resumed = (load_file(path / "model.safetensors") for path in (whole / "target", half))
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_a_checkpoint_of_another_shape_is_refused(built: Path) -> None:
    with pytest.raises(ValueError, match="holds another geometry"):
        train_stage(job(built), Stage(tiny("target", 2, num_layers=3)))


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
