"""The model card of the demo pair, written from measured scores and the build's own record.

Knows how to put numbers into sentences; measures nothing.
"""

from pathlib import Path
from typing import Any

from demo_recipe.evaluate import GOALS, WRITTEN_GOALS, shortfalls
from demo_recipe.tokenizer import BOS, END

BAR = "\\|"  # inside a table cell

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# kvchat demo {role}

{what}

The pair exists so that `make chat` makes sense on a machine without a network. Its target greets,
explains kvchat, remembers what it is told, spells, adds small numbers, knows days and months,
tells short stories and poems, and shows a few code snippets. Everything else it refuses in one
sentence that names a way out: `kvchat --model <hub id or directory>`.

## What it is

{facts}

## What it was trained on

Only on dialogues that kvchat's own recipe generates from grammars and word lists written for it; no
other text and no other model was involved. {training} `../manifest.json` records every stage.

## How well it works

Greedy decoding of the shipped target. The model's own replies stand in the history, but for the
turns between in the two longest recall tests, which are scripted. *Known*: phrasings like those of
the training, with names and values it never saw. *Unseen*: phrasings kept from training by hash,
one pattern in ten. All sums to 20 are trained; there only the phrasing is new. *Handwritten*: fifty
prompts written before the dialogue generator; training text that repeats one is discarded.

{scores}

{finished}

{speculation}

{shortfalls}

Reproduce with `python -m demo_recipe.evaluate` in the source tree.{measured}

## What it cannot do

It knows nothing of the world, has no clock and no network, and does not reason. It is often wrong
when a request is phrased in an unusual way, and it may take an out-of-scope question for one of its
skills. It keeps no lists, misspells many a word it is asked to spell or turn around, and often
loses what was told thousands of tokens ago. Of kvchat it knows the commands that there were when it
was trained; the tests ask for all that there are. It writes English only. Nothing it says should be
relied on.
"""
TARGET_IS = "The tiny chat model that ships with kvchat: the target of the demo pair."
DRAFT_IS = (
    "The draft of the demo pair: one layer that guesses the target's tokens, trained on the same "
    "dialogues and "
    "then on the target's own answers. It is for speculative decoding and is no use alone."
)


def write_card(home: Path, scores: dict[str, Any], made: dict[str, Any]) -> None:
    """Write README.md into both model folders of `home`."""
    for folder, what in (("target", TARGET_IS), ("draft", DRAFT_IS)):
        shipped = made["shipped"][folder]
        stage = made["stages"][next(iter(shipped))]
        if len(shipped) > 1:
            what += f" Its weights are the mean of those after {len(shipped)} stages of training."
        text = card(folder, what, stage, scores, made, home / folder)
        (home / folder / "README.md").write_text(text, encoding="utf-8")


def card(
    role: str,
    what: str,
    stage: dict[str, Any],
    scores: dict[str, Any],
    made: dict[str, Any],
    folder: Path,
) -> str:
    """The card of one model."""
    return CARD.format(
        role=role,
        what=what,
        facts=_facts(stage, (folder / "model.safetensors").stat().st_size),
        training=_training(made),
        scores=_scores(scores["tests"]),
        finished=_finished(scores["ends by itself"]),
        speculation=_speculation(scores["speculation"]),
        shortfalls=_shortfalls(scores),
        measured=_measured(scores),
    )


def _facts(stage: dict[str, Any], num_bytes: int) -> str:
    shape = stage["geometry"]
    layers, heads = shape["num_hidden_layers"], shape["num_attention_heads"]
    rows = {
        "architecture": f"`LlamaForCausalLM`, {layers} layer{'s' if layers > 1 else ''}, "
        f"hidden size {shape['hidden_size']}, {heads} query heads and "
        f"{shape['num_key_value_heads']} KV heads of {shape['head_dim']}",
        "parameters": f"{stage['parameters']:,}",
        "weights": f"bfloat16 safetensors, {num_bytes / 1e6:.1f} MB",
        "vocabulary": f"{shape['vocab_size']:,} tokens, byte-level BPE; a number to 99 is one",
        "context": f"{shape['max_position_embeddings']:,} tokens",
        "chat template": f"`{BOS}`, then `<|role|>text{END}` a message; append-only",
        "licence": "Apache-2.0",
    }
    lines = [f"| {name} | {text.replace('|', BAR)} |" for name, text in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _training(made: dict[str, Any]) -> str:
    """How much training the pair took, all stages together."""
    stages = made["stages"].values()
    tokens = sum(stage["tokens"] for stage in stages)
    minutes = sum(stage["minutes"] for stage in stages)
    return (
        f"Target and draft took {len(stages)} stages, {tokens / 1e6:.0f} M tokens and "
        f"{minutes / 60:.0f} hours on {made['machine']}, built on {made['built']}."
    )


def _scores(tests: dict[str, Any]) -> str:
    lines = ["| test | known | goal | unseen | goal | probes |", "|---|---|---|---|---|---|"]
    for test, grades in tests.items():
        known_goal, unseen_goal = GOALS.get(test, (None, WRITTEN_GOALS.get(test)))
        probes = " + ".join(str(grade["probes"]) for grade in grades.values())
        cells = (
            _percent(grades.get("known", {}).get("rate")),
            _percent(known_goal),
            _percent(grades["unseen"]["rate"]),
            _percent(unseen_goal),
            probes,
        )
        lines.append(f"| {test} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0%}" if rate == round(rate, 2) else f"{rate:.1%}"


def _finished(ends: dict[str, Any]) -> str:
    return (
        f"{ends['finished']:,} of {ends['replies']:,} replies ({ends['rate']:.2%}) ended by "
        f"themselves "
        "within 160 tokens."
    )


def _shortfalls(scores: dict[str, Any]) -> str:
    missed = [
        f"{what} ({_figure(score)}, goal {_figure(goal)})"
        for what, score, goal in shortfalls(scores)
    ]
    return f"**Goals not reached:** {'; '.join(missed)}." if missed else "Every goal is reached."


def _measured(scores: dict[str, Any]) -> str:
    """Which rows are of a later day than the build, in a sentence a day."""
    days: dict[str, list[str]] = {}
    for test in scores["tests"]:
        if day := scores.get("measured", {}).get(test):
            days.setdefault(day, []).append(test)
    return "".join(f" Measured anew on {day}: {'; '.join(days[day])}." for day in sorted(days))


def _figure(value: float) -> str:
    return f"{value:.2f}" if value > 1 else _percent(value)


def _speculation(measured: dict[str, Any]) -> str:
    parts = [
        f"{grade} phrasing {numbers['mean acceptance length']:.2f} tokens a round "
        f"({numbers['acceptance rate']:.0%} of drafts accepted)"
        for grade, numbers in measured.items()
    ]
    return f"Speculation with four drafted tokens, the bonus token included: {', '.join(parts)}."
