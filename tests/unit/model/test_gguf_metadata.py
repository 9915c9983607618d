"""Odd numbers in a GGUF file's metadata mean what they mean to llama.cpp, or are refused."""

from pathlib import Path
from typing import Any

import pytest

from kvchat.core.errors import ModelError
from kvchat.model.gguf.config import gguf_config
from kvchat.model.gguf.file import GgufModel, GgufTensor

_PLAIN = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.freq_base": 10000.0,
}


def config_of(**odd: Any) -> dict[str, Any]:
    names = _PLAIN | {name.replace("__", "."): value for name, value in odd.items()}
    metadata = {f"llama.{name}": value for name, value in names.items()}
    table = GgufTensor("token_embd.weight", (100, 64), 0, Path("m.gguf"), 0, 25600)
    tensors = {table.name: table}
    return gguf_config(
        GgufModel((), {"general.architecture": "llama", **metadata}, tensors, {}), "m.gguf"
    )


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({}, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ],
    ids=["none", "0", "yarn of 0", "kind none", "no kind", "as older files spell it"],
)
def test_a_rope_factor_means_what_it_means_to_llama_cpp(odd, expected):
    """A factor of 0 gave logits that are no numbers, and one without a kind was ignored."""
    assert config_of(**odd).get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"context_length": -1}, "has context_length -1"),
        ({"context_length": 0}, "has context_length 0"),
        ({"block_count": -2}, "has block_count -2"),
        ({"attention__key_length": -16}, "has attention.key_length -16"),
        ({"rope__scaling__factor": -4.0}, "has rope scaling by -4.0"),
        ({"rope__scaling__factor": float("nan")}, "has rope scaling by nan"),
        ({"rope__scaling__factor": "four"}, "do not describe a model"),
        ({"context_length": "long"}, "has context_length"),
    ],
)
def test_a_number_that_no_model_has_is_refused_by_name(odd: dict[str, Any], said: str) -> None:
    """A context of -1 tokens was loaded, and then refused every message."""
    with pytest.raises(ModelError, match=said):
        config_of(**odd)
