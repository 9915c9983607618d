"""The model card of the demo pair, written from measured scores and the build's own record.

Knows how to put numbers into sentences; measures nothing.
"""

from importlib import resources
from pathlib import Path
from typing import Any

from demo_recipe.evaluate import GOALS, WRITTEN_GOALS, shortfalls
from demo_recipe.tokenizer import BOS, END

BAR = "\\|"  # inside a table cell

CARD = resources.files("demo_recipe").joinpath("texts/card.md")
ROLES = {
    "target": "The tiny chat model that ships with kvchat: the target of the demo pair.",
    "draft": "The draft of the demo pair: one layer that guesses the target's tokens, trained on "
    "the same dialogues and then on the target's own answers. It is for speculative decoding and "
    "is no use alone.",
}


def write_card(home: Path, scores: dict[str, Any], made: dict[str, Any]) -> None:
    """Write README.md into both model folders of `home`."""
    for role, what in ROLES.items():
        folder, shipped = home / role, made["shipped"][role]
        stage = made["stages"][next(iter(shipped))]
        if len(shipped) > 1:
            what += f" Its weights are the mean of those after {len(shipped)} stages of training."
        ends = scores["ends by itself"]
        text = CARD.read_text(encoding="utf-8").format(
            role=role,
            what=what,
            facts=_facts(stage, (folder / "model.safetensors").stat().st_size),
            training=_training(made),
            scores=_scores(scores["tests"]),
            finished=f"{ends['finished']:,} of {ends['replies']:,} replies ({ends['rate']:.2%}) "
            "ended by themselves within 160 tokens.",
            speculation=_speculation(scores["speculation"]),
            shortfalls=_shortfalls(scores),
            measured=_measured(scores),
        )
        (folder / "README.md").write_text(text, encoding="utf-8")


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
    tokens, minutes = (sum(stage[name] for stage in stages) for name in ("tokens", "minutes"))
    return (
        f"Target and draft took {len(stages)} stages, {tokens / 1e6:.0f} M tokens and "
        f"{minutes / 60:.0f} hours on {made['machine']}, built on {made['built']}."
    )


def _scores(tests: dict[str, Any]) -> str:
    lines = ["| test | known | goal | unseen | goal | probes |", "|---|---|---|---|---|---|"]
    for test, grades in tests.items():
        known_goal, unseen_goal = GOALS.get(test, (None, WRITTEN_GOALS.get(test)))
        rates = (grades.get("known", {}).get("rate"), known_goal, grades["unseen"]["rate"])
        probes = " + ".join(str(grade["probes"]) for grade in grades.values())
        cells = " | ".join(map(_percent, (*rates, unseen_goal)))
        lines.append(f"| {test} | {cells} | {probes} |")
    return "\n".join(lines)


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0%}" if rate == round(rate, 2) else f"{rate:.1%}"


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
