"""Over chats of every length a bfloat16 model on a CPU hands few shapes to torch's products.

torch's library compiles each shape and keeps the code. With one shape per length of a turn this was
a gigabyte after a thousand turns.
"""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvchat.core.config import ModelConfig
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.cpu_products import few_sizes
from support.checkpoints import save_checkpoint, tiny_model

BLOCK = 16
NUM_BLOCKS = 64
LENGTHS = range(1, 400, 9)
# Products by name, and which of their arguments are multiplied.
PRODUCTS = {"linear": 0, "mm": 0, "addmm": 1}
SIZES = {few_sizes(count) for count in range(1, 1025)}


class Shapes(TorchDispatchMode):
    """Records what products in bfloat16 multiply: numbers of rows and, of attention, of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()
        self.keys: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS and args[PRODUCTS[name]].dtype == torch.bfloat16:
            self.rows.add(args[PRODUCTS[name]].shape[-2])
        if "scaled_dot_product" in name:
            self.rows.add(args[0].shape[-2])
            self.keys.add(args[1].shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_a_processor_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvchat_kernels.paged_attention.cpu.multiplies_in", lambda dtype: True)
    for module in ("kvchat_kernels.linear.cpu", "kvchat.model.cpu.compiled_step"):
        monkeypatch.setattr(f"{module}.is_fast_by_torch", lambda dtype: True)


def loaded(directory: Path, model_type: str) -> LoadedModel:
    model = tiny_model(model_type, max_position_embeddings=2048, num_hidden_layers=1).bfloat16()
    source = find_model(str(save_checkpoint(directory, model)))
    return load_model(source, ModelConfig(), None, lambda event: None)


def shapes_of_turns(model: LoadedModel) -> Shapes:
    """Run turns of all lengths, each behind a history of another, and a token after each."""
    pools = [
        tuple(
            torch.zeros(NUM_BLOCKS, BLOCK, layer.num_kv_heads, dim, dtype=torch.bfloat16)
            for dim in (layer.key_dim, layer.value_dim)
        )
        for layer in model.spec.storing_layers
    ]
    paged = PagedModel(model, pools)  # type: ignore[arg-type]
    blocks = range(1, NUM_BLOCKS)
    with Shapes() as shapes:
        for length in LENGTHS:
            start = length * 7 % 500
            for count, at in ((length, start), (1, start + length)):
                piece = SequencePiece([1] * count, at, blocks, 1)
                paged.forward(build_batch([piece], BLOCK, model.device))
    return shapes


@pytest.mark.usefixtures("on_a_processor_with_bfloat16")
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_turns_of_all_lengths_make_few_shapes(model_type: str, tmp_path: Path) -> None:
    """One model has compiled steps where rows are few, the other its own code always."""
    seen = shapes_of_turns(loaded(tmp_path, model_type))
    assert len(seen.rows) > 10, "nothing was recorded"
    assert seen.rows <= SIZES
    assert len(seen.keys) > 5, "nothing was recorded"
    assert seen.keys <= SIZES


def test_the_library_is_told_to_keep_few_shapes_unless_the_user_has_said_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "500")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    loaded(tmp_path, "llama")
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"ONEDNN_PRIMITIVE_CACHE_CAPACITY") == b"64"
    assert getenv(b"LRU_CACHE_CAPACITY") == b"500"
