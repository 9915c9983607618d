"""`python -m demo_recipe.recipe`: build the demo pair, or go on where an earlier run stopped.

Tokenizer, the training stages of target and draft, files, evaluation, card, manifest. Every stage
leaves its result in the work folder and is skipped when it is there. A pair that exists can stand
for the stages before a given one, which trains it further. Knows the order; the plans know the
numbers.
"""

import argparse
import functools
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from demo_recipe.card import write_card
from demo_recipe.checkpoint import (
    Reached,
    export,
    load_mean,
    load_network,
    reached,
    save_finished,
)
from demo_recipe.conversation import Conversations
from demo_recipe.distill import Distillation
from demo_recipe.evaluate import Report, acceptance, evaluate_files
from demo_recipe.manifest import renew_scores, write_manifest
from demo_recipe.mixes import USUAL
from demo_recipe.paths import HOME
from demo_recipe.plans import CONTEXT, FULL, VOCAB_SIZE, Mean, Recipe, Stage
from demo_recipe.talkers import ModelTalker
from demo_recipe.team import Team, run_team
from demo_recipe.tokenizer import ChatTokenizer, train_tokenizer
from demo_recipe.train import Machine, train

TOKENIZER_SEED = 5
HISTORY = "history.txt"  # in the work folder: what earlier stages learnt otherwise, in words
UNTOLD = "All stages learnt from the dialogues as they are now."


@dataclass(frozen=True, slots=True)
class Build:
    """One build: what, where, and with how many processes."""

    recipe: Recipe
    work: Path
    home: Path
    num_workers: int
    is_compiled: bool


def build(job: Build) -> None:
    """Run all stages that are not done yet, and write the pair to `job.home`."""
    _tokenizer(job)
    for stage in job.recipe.stages:
        if reached(job.work / stage.name).next_leg < stage.plan.num_legs:
            _note(f"{stage.name}: {stage.plan.num_steps} steps")
            run_team(job.num_workers, functools.partial(_train_stage, job, stage))
    _export(job)
    _note("evaluation")
    report = _evaluate(job)
    scores = job.work / "scores.json"
    scores.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    made = _made(job)
    write_card(job.home, report.as_json(), made)
    write_manifest(job.home, made, report.as_json())
    _note(f"done: {job.home}")


def _tokenizer(job: Build) -> None:
    folder = job.work / "tokenizer"
    if (folder / "tokenizer.json").exists():
        return
    _note("tokenizer")
    chats = Conversations(TOKENIZER_SEED).stream(USUAL)
    few = itertools.islice(chats, job.recipe.num_tokenizer_chats)
    ChatTokenizer(train_tokenizer(few, VOCAB_SIZE)).save(folder, CONTEXT)


def adopt(job: Build, pair: Path, before: str) -> None:
    """Let the weights of a built pair stand for every stage ahead of `before`.

    The pair's own manifest, if there is one, says how long they took and what they learnt from.
    """
    shutil.copytree(pair / "target", job.work / "tokenizer", dirs_exist_ok=True)
    manifest = pair / "manifest.json"
    made = json.loads(manifest.read_text(encoding="utf-8"))["made"] if manifest.exists() else {}
    (job.work / HISTORY).write_text(made.get("history", UNTOLD), encoding="utf-8")
    for stage in itertools.takewhile(lambda stage: stage.name != before, job.recipe.stages):
        role = "target" if stage.name.startswith("target") else "draft"
        minutes = made.get("stages", {}).get(stage.name, {}).get("minutes", 0)
        done = Reached(stage.plan.num_legs, 60.0 * minutes)
        save_finished(job.work / stage.name, load_network(pair / role), done)


def _train_stage(job: Build, stage: Stage, team: Team) -> None:
    """Train one stage in this process of the team."""
    machine = Machine.detected(is_compiled=job.is_compiled, team=team)
    loss = None
    if stage.teacher:
        teacher = load_mean(_folders(job, stage.teacher)).to(machine.device)
        loss = Distillation(teacher, machine.dtype)
    train(
        stage.plan,
        ChatTokenizer.load(job.work / "tokenizer"),
        job.work / stage.name,
        machine,
        initial=load_mean(_folders(job, stage.after)) if stage.after else None,
        loss_of=loss,
    )


def _export(job: Build) -> None:
    tokenizer = ChatTokenizer.load(job.work / "tokenizer")
    for name, stages in job.recipe.shipped.items():
        folder = job.home / name
        shutil.rmtree(folder, ignore_errors=True)
        network = load_mean(_folders(job, stages))
        export(
            folder,
            network,
            bos_id=tokenizer.bos_id,
            end_id=tokenizer.end_id,
            pad_id=tokenizer.pad_id,
        )
        tokenizer.save(folder, CONTEXT)


def _evaluate(job: Build) -> Report:
    """Score the files just written, not the float32 weights they came from."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = ModelTalker.load(job.home / "target", device)
    draft = ModelTalker.load(job.home / "draft", device)
    count, tests = job.recipe.num_probes, job.recipe.tests
    report = evaluate_files(job.home / "target", count, tests, job.num_workers)
    return Report(report.scores, acceptance(target, draft, count, tests))


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
    return {
        "stages": stages,
        "shipped": {role: _rounded(mean) for role, mean in job.recipe.shipped.items()},
        "history": _history(job.work / HISTORY),
        "machine": _machine(),
        "built": time.strftime("%Y-%m-%d"),
    }


def _folders(job: Build, mean: Mean) -> dict[Path, float]:
    return {job.work / name: share for name, share in mean.items()}


def _rounded(mean: Mean) -> dict[str, float]:
    return {name: round(share, 4) for name, share in mean.items()}


def _history(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else UNTOLD


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores"


def _note(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the demo pair."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path(".demo-build"), help="checkpoints go here"
    )
    parser.add_argument(
        "--home", type=Path, help="where target/ and draft/ go (default: the package)"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="training processes"
    )
    parser.add_argument(
        "--adopt", type=Path, help="a built pair whose weights stand for the stages before --at"
    )
    parser.add_argument("--at", help="the first stage to train after --adopt")
    parser.add_argument(
        "--renew",
        type=Path,
        help="put a JSON report of demo_recipe.evaluate into the cards; no build",
    )
    parser.add_argument("--no-compile", action="store_true", help="train without a C++ compiler")
    options = parser.parse_args(arguments)
    if options.renew:
        report = json.loads(options.renew.read_text(encoding="utf-8"))
        renew_scores(options.home or HOME, report, time.strftime("%Y-%m-%d"))
        return
    work = options.work / "full"
    work.mkdir(parents=True, exist_ok=True)
    num_workers = 1 if torch.cuda.is_available() else options.workers
    job = Build(FULL, work, options.home or HOME, num_workers, not options.no_compile)
    if options.adopt:
        names = [stage.name for stage in FULL.stages]
        if options.at not in names:
            parser.error(f"--at names one of: {', '.join(names)}")
        adopt(job, options.adopt, options.at)
    build(job)


if __name__ == "__main__":
    main()
