"""The shipped pair: the files are the pinned ones, small enough, and fit for kvchat.

The scores themselves are measured by the slow test at the end (make soak).
"""

import json

import pytest
import torch
from safetensors import safe_open

from kvchat.demo.checkpoint import load_network
from kvchat.demo.evaluate import (
    ACCEPTANCE_GOAL,
    FINISHED_GOAL,
    GOALS,
    HANDWRITTEN_GOAL,
    acceptance,
    evaluate,
)
from kvchat.demo.manifest import digests
from kvchat.demo.paths import DRAFT, HOME, MANIFEST, TARGET
from kvchat.demo.talkers import NetworkTalker

LIMITS = {"target": (12_000_000, 24_000_000), "draft": (1_500_000, 3_000_000)}


def test_every_shipped_file_has_the_pinned_digest() -> None:
    assert json.loads(MANIFEST.read_text())["files"] == digests(HOME)


@pytest.mark.parametrize("name", LIMITS)
def test_parameters_and_bytes_stay_within_their_limits(name: str) -> None:
    max_parameters, max_bytes = LIMITS[name]

    assert load_network(HOME / name).num_parameters() <= max_parameters
    assert sum(path.stat().st_size for path in (HOME / name).iterdir()) <= max_bytes


@pytest.mark.parametrize("name", LIMITS)
def test_weights_are_bfloat16_and_the_context_is_long_enough(name: str) -> None:
    with safe_open(HOME / name / "model.safetensors", "pt") as weights:
        dtypes = {weights.get_tensor(key).dtype for key in weights.keys()}  # noqa: SIM118

    assert dtypes == {torch.bfloat16}
    assert load_network(HOME / name).geometry.max_position_embeddings >= 4096


def test_target_and_draft_share_the_tokenizer_and_its_template() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()


def test_the_draft_is_one_layer() -> None:
    assert load_network(DRAFT).geometry.num_hidden_layers == 1


def test_the_target_greets_and_ends_its_reply() -> None:
    talker = NetworkTalker.load(TARGET, torch.device("cpu"))

    reply = talker.reply([[{"role": "user", "content": "Hello!"}]])[0]

    assert reply.is_finished
    assert "hello" in reply.text.lower()


@pytest.mark.soak
def test_the_shipped_pair_reaches_its_goals() -> None:
    target = NetworkTalker.load(TARGET, torch.device("cpu"))
    draft = NetworkTalker.load(DRAFT, torch.device("cpu"))

    scores = evaluate(target, 100).as_json()
    speculation = acceptance(target, draft, 40)

    short = {
        (test, grade): scores["tests"][test][grade]["rate"]
        for test, goals in GOALS.items()
        for grade, goal in zip(("known", "unseen"), goals, strict=True)
        if scores["tests"][test][grade]["rate"] < goal
    }
    assert not short
    assert scores["tests"]["handwritten"]["unseen"]["rate"] >= HANDWRITTEN_GOAL
    assert scores["ends by itself"]["rate"] >= FINISHED_GOAL
    assert min(part["mean acceptance length"] for part in speculation.values()) >= ACCEPTANCE_GOAL
