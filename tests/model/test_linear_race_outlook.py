"""What `models info` says of products: the shapes it looks for are those that a load races."""

from pathlib import Path

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model.linear_race import LinearShape, Outcome
from kvchat.model.linear_race_outlook import (
    outcomes_in_words,
    product_shapes,
    products_in_words,
)
from kvchat.model.loader import load_model
from kvchat.model.source import find_model
from support.architectures import SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3, mixed windows", "olmo2"])
def test_the_shapes_are_those_that_are_raced(name: str, tmp_path: Path) -> None:
    """Or more: OLMo's attention has the right layers, and turns out not to be fused."""
    model_type, settings = SUPPORTED[name]
    source = find_model(str(save_checkpoint(tmp_path, tiny_model(model_type, **settings))))
    config = ModelConfig(device="cpu", dtype="float32")
    loaded = load_model(source, config, None, lambda _: None)
    assert loaded.fusing is not None

    shapes = product_shapes(loaded.module.config, loaded.spec, torch.float32)

    raced = {product.operands.shape for product in loaded.fusing.merged_products()}
    assert raced
    assert shapes >= raced
    assert shapes == raced or name == "olmo2"


def test_only_the_models_own_shapes_are_counted() -> None:
    own, other = LinearShape(8, 4, "bfloat16", False), LinearShape(8, 4, "bfloat16", True)
    outcomes = {
        (own, 1): Outcome(2.0, 1.0),
        (own, 2): Outcome(1.0, 1.0),
        (own, 4): Outcome(refusal="it computes other numbers than torch"),
        (other, 1): Outcome(2.0, 1.0),
    }

    assert "faster for 1 of 3 sizes" in outcomes_in_words({own}, outcomes)
    assert "when the model is loaded" in outcomes_in_words({own}, {})


def test_a_cpu_has_torchs_products(tmp_path: Path) -> None:
    loaded_on = torch.device("cpu")

    words = products_in_words(None, None, loaded_on, torch.float32, tmp_path)  # type: ignore[arg-type]

    assert words.startswith("torch's own")
