"""`python -m demo_recipe.recipe`: build the demo pair, or go on where an earlier run stopped.

Tokenizer, the training stages of target and draft, files, evaluation, card, manifest. Every stage
leaves its result in the work folder and is skipped when it is there. Knows the order; the plans
know the numbers.
"""

import argparse
import itertools
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from demo_recipe.card import write_card
from demo_recipe.checkpoint import export, load_mean, load_network, reached
from demo_recipe.conversation import Conversations
from demo_recipe.distill import Distillation
from demo_recipe.evaluate import evaluate_pair
from demo_recipe.manifest import renew_scores, write_manifest
from demo_recipe.mixes import USUAL
from demo_recipe.optimiser import best_device, product_dtype
from demo_recipe.paths import HOME
from demo_recipe.plans import CONTEXT, FULL, HISTORY, VOCAB_SIZE, Mean, Recipe, Stage
from demo_recipe.tokenizer import ChatTokenizer, train_tokenizer
from demo_recipe.train import note, train

TOKENIZER_SEED = 5


@dataclass(frozen=True, slots=True)
class Build:
    """One build: what and where."""

    recipe: Recipe
    work: Path
    home: Path


def build(job: Build) -> None:
    """Run all stages that are not done yet, and write the pair to `job.home`."""
    _tokenizer(job)
    for stage in job.recipe.stages:
        if reached(job.work / stage.name).next_leg < stage.plan.num_legs:
            note(f"{stage.name}: {stage.plan.num_steps} steps")
            train_stage(job, stage)
    _export(job)
    note("evaluation")
    # Of the files just written, not of the float32 weights they came from.
    folders = (job.home / "target", job.home / "draft")
    report = evaluate_pair(*folders, job.recipe.num_probes, job.recipe.tests).as_json()
    made = _made(job)
    write_card(job.home, report, made)
    write_manifest(job.home, made, report)
    note(f"done: {job.home}")


def _tokenizer(job: Build) -> None:
    folder = job.work / "tokenizer"
    if (folder / "tokenizer.json").exists():
        return
    note("tokenizer")
    chats = Conversations(TOKENIZER_SEED).stream(USUAL)
    few = itertools.islice(chats, job.recipe.num_tokenizer_chats)
    ChatTokenizer(train_tokenizer(few, VOCAB_SIZE)).save(folder, CONTEXT)


def train_stage(job: Build, stage: Stage) -> None:
    """Train one stage, on from its checkpoint if there is one."""
    dtype = product_dtype(best_device())
    loss_of = lambda network, rows: network.loss(rows, dtype)  # noqa: E731
    if stage.teacher:
        teacher = load_mean(_folders(job, stage.teacher)).to(best_device())
        loss_of = Distillation(teacher, dtype, stage.trusted)
    initial = load_mean(_folders(job, stage.after)) if stage.after else None
    tokenizer = ChatTokenizer.load(job.work / "tokenizer")
    train(stage.plan, tokenizer, job.work / stage.name, initial, loss_of)


def _export(job: Build) -> None:
    tokenizer = ChatTokenizer.load(job.work / "tokenizer")
    for name, stages in job.recipe.shipped.items():
        folder = job.home / name
        shutil.rmtree(folder, ignore_errors=True)
        network = load_mean(_folders(job, stages))
        export(folder, network, tokenizer.bos_id, tokenizer.end_id, tokenizer.pad_id)
        tokenizer.save(folder, CONTEXT)


def _made(job: Build) -> dict[str, object]:
    """How the pair was built, for the manifest and the card."""
    stages = {}
    for stage in job.recipe.stages:
        plan = stage.plan
        stages[stage.name] = {
            "after": _rounded(stage.after),
            "teacher": _rounded(stage.teacher),
            "seed": plan.seed,
            "steps": plan.num_steps,
            "tokens": plan.num_steps * plan.batch_tokens,
            "minutes": round(reached(job.work / stage.name).seconds / 60),
            "parameters": load_network(job.work / stage.name).num_parameters(),
            "geometry": asdict(plan.geometry),
        }
    on_gpu = torch.cuda.is_available()
    return {
        "stages": stages,
        "shipped": {role: _rounded(mean) for role, mean in job.recipe.shipped.items()},
        "history": HISTORY.strip(),
        "machine": torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} CPU cores",
        "built": time.strftime("%Y-%m-%d"),
    }


def _folders(job: Build, mean: Mean) -> dict[Path, float]:
    return {job.work / name: share for name, share in mean.items()}


def _rounded(mean: Mean) -> dict[str, float]:
    return {name: round(share, 4) for name, share in mean.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the demo pair."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--work", type=Path, default=Path(".demo-build/full"), help="checkpoints")
    parser.add_argument("--home", type=Path, default=HOME, help="where target/ and draft/ go")
    parser.add_argument(
        "--renew", type=Path, help="put a report of demo_recipe.evaluate into the cards; no build"
    )
    given = parser.parse_args(arguments)
    if given.renew:
        report = json.loads(given.renew.read_text(encoding="utf-8"))
        renew_scores(given.home, report, time.strftime("%Y-%m-%d"))
        return
    given.work.mkdir(parents=True, exist_ok=True)
    build(Build(FULL, given.work, given.home))


if __name__ == "__main__":
    main()
