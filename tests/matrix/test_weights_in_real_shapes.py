"""Each format of the weights in real models' shapes: it computes what plain products compute.

Over prompts, in steps of every size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvchat.core.config import ModelConfig
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from support.matrix import spread
from support.real_shapes import REAL_SHAPES, save_random
from support.soak_sizes import short_and_long

_BLOCK_SIZE = 16
# What a row of logits may be off by, of its length. The model in `auto` rounds to bfloat16. Beside
# weights of 4 bits the activations have 8 bits, which the twin does not round: 0.019 was measured.
# (A twin that rounds them is no closer: a last bit of float32 decides which of two levels an
# activation takes, and the float32 and the float64 twin then differ by 0.01.)
_MOST_OFF = {"auto": 0.05, "int8": 0.002, "int4": 0.04}


@dataclass(frozen=True)
class Subject:
    """A checkpoint in a real shape, in bfloat16, and what transformers makes of it in float32."""

    name: str
    source: ModelSource

    def twin(self, weights: str) -> Any:
        """Return the plain model whose linear layers hold rounded weights in float32."""
        model = AutoModelForCausalLM.from_pretrained(
            self.source.directory, dtype=torch.float32, attn_implementation="eager"
        )
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())  # an embedding keeps its own
        for layer in (*model.base_model.modules(), head):
            if type(layer).__name__ in ("Linear", "Conv1D"):
                is_turned = type(layer).__name__ == "Conv1D"
                weight = layer.weight.data.t() if is_turned else layer.weight.data
                rounded = _rounded(weight, weights, is_head=layer is head)
                layer.weight.data = rounded.t() if is_turned else rounded
        return model

    def load(self, weights: str, dtype: str) -> LoadedModel:
        config = ModelConfig(weights=weights, dtype=dtype)
        return load_model(self.source, config, None, lambda _: None)


def _rounded(weight: torch.Tensor, weights: str, is_head: bool) -> torch.Tensor:
    """Return a weight [out, in] as its format has it; the formats' own words, written anew."""
    if weights == "auto":
        return weight
    num_out, num_in = weight.shape
    missing = -num_in % 32
    blocks = torch.nn.functional.pad(weight, [0, missing]).reshape(num_out, -1, 32)
    if weights == "int8" or is_head:
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-7).half().float()
        rounded = (blocks / scale).round().clamp(-127, 127) * scale
    else:
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-7).half().float()
        low = low.half().float()
        rounded = ((blocks - low) / scale).round().clamp(0, 15) * scale + low
    return rounded.reshape(num_out, -1)[:, :num_in]


_IN_FORMS_OF_THEIR_OWN = [
    "Gemma 2 2B, a quarter as wide, softcap and window",
    "Phi-3 mini, a quarter as wide, fused products",
    "GPT-2, a quarter as wide, turned weights",
    "odd everywhere",
]


@pytest.fixture(scope="module", params=spread(REAL_SHAPES, _IN_FORMS_OF_THEIR_OWN))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("shape")
    return Subject(request.param, save_random(directory, request.param))


def every_size(length: int) -> Iterator[int]:
    """Yield steps of 1, 2, 3 and so on tokens, as many in all as `length`."""
    size = 0
    while length:
        size = min(size + 1, length)
        length -= size
        yield size


def in_one(length: int) -> Iterator[int]:
    yield length


def logits_over(loaded: LoadedModel, ids: list[int], sizes: Iterator[int]) -> dict[int, Any]:
    """Read a prompt in steps of `sizes`; return logits by position. Every other step reads none,
    as those in the middle of a prompt do."""
    num_blocks = 1 + -(-len(ids) // _BLOCK_SIZE)
    pools = [
        (
            torch.zeros(num_blocks, _BLOCK_SIZE, layer.num_kv_heads, layer.key_dim),
            torch.zeros(num_blocks, _BLOCK_SIZE, layer.num_kv_heads, layer.value_dim),
        )
        for layer in loaded.spec.storing_layers
    ]
    model = PagedModel(loaded, [(k.to(loaded.dtype), v.to(loaded.dtype)) for k, v in pools])
    found, start, reads = {}, 0, False
    for size in sizes:
        reads = not reads or start + size == len(ids)
        piece = SequencePiece(ids[start : start + size], start, range(1, num_blocks), int(reads))
        logits = model.forward(build_batch([piece], _BLOCK_SIZE, loaded.device))
        start += size
        assert logits.shape == (int(reads), loaded.spec.vocab_size)
        if reads:
            found[start - 1] = logits[0]
    return found


@short_and_long(60, 2000)
@pytest.mark.parametrize("weights", spread(["auto", "int8", "int4"], ["auto", "int4"]))
def test_prompts_in_steps_of_every_size_are_read_as_by_plain_products(subject, weights, size):
    """A step that reads no rows once failed with packed weights: any prompt longer than a step."""
    loaded = subject.load(weights, "bfloat16" if weights == "auto" else "float32")
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(0, loaded.spec.vocab_size, (size,), generator=generator)
    with torch.inference_mode():
        expected = subject.twin(weights)(input_ids=ids[None], use_cache=False).logits[0]

    steps: Callable[[int], Iterator[int]]
    for steps in (every_size, in_one):
        found = logits_over(loaded, ids.tolist(), steps(size))
        assert size - 1 in found
        for position, logits in found.items():
            off = (logits - expected[position]).norm() / expected[position].norm()
            assert off < _MOST_OFF[weights], (position, float(off))


@pytest.mark.parametrize(("weights", "dtype"), [("int8", "bfloat16"), ("int4", "float16")])
def test_fewer_bits_are_loaded_in_16_bits_too(subject: Subject, weights: str, dtype: str) -> None:
    packed = subject.load(weights, dtype)
    logits = logits_over(packed, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], every_size(11))
    assert all(row.isfinite().all() for row in logits.values())
