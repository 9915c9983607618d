"""Fused parts: which kernels they take, here by the kernels' twins.

tests/unit/kernels checks what each kernel computes, `test_fuse.py` what models compute by them.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from kvchat.model.gpu import fused_parts
from kvchat.model.gpu.fused_parts import MergedProduct, RmsNorm
from kvchat.model.hf.gates import GATES, activation_of
from kvchat.model.paged_model import PagedModel
from kvchat_kernels import kv_layer
from kvchat_kernels.cpu.gates import Activation
from kvchat_kernels.row_operations import gelu_tanh_mul, silu_mul
from support.compiled_steps import batch_of, pools_of
from support.fused_models import load_fused

# (new tokens, context) of each sequence.
STEP = [(1, 9), (4, 33), (2, 2)]


def test_a_layer_takes_the_kernels_and_nothing_beside_them(monkeypatch, tmp_path):
    called: list[str] = []

    def spy(module: object, name: str) -> None:
        own = getattr(module, name)

        def count(*args: object, **kwargs: object) -> object:
            called.append(name)
            return own(*args, **kwargs)

        monkeypatch.setattr(module, name, count)

    def gate(*args: torch.Tensor) -> torch.Tensor:
        called.append("silu_mul")
        return silu_mul(*args)

    monkeypatch.setitem(GATES, Activation.SILU, gate)
    loaded = load_fused(tmp_path, "llama", "float32")
    spy(fused_parts, "rope_kv_write")
    spy(kv_layer, "kv_write")
    spy(fused_parts, "rms_norm")
    spy(fused_parts, "add_rms_norm")

    PagedModel(loaded, pools_of(loaded)).forward(batch_of(STEP))

    assert called == ["rms_norm", "rope_kv_write", "add_rms_norm", "silu_mul"] * 2 + ["rms_norm"]


def test_one_row_takes_the_kernel_and_more_rows_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it is depends on the number of rows alone: once a race at load decided."""
    shapes: list[tuple[int, ...]] = []

    def counted(row: torch.Tensor, *operands: torch.Tensor | None) -> torch.Tensor:
        shapes.append(tuple(row.shape))
        return linear(row, *operands)

    monkeypatch.setattr(fused_parts, "one_row_linear", counted)
    product = MergedProduct([nn.Linear(6, 4), nn.Linear(6, 2)])

    outs = [product(torch.ones(*shape, 6)) for shape in ((1,), (1, 1), (2,), (1, 17))]

    assert [tuple(out.shape) for out in outs] == [(1, 6), (1, 1, 6), (2, 6), (1, 17, 6)]
    assert shapes == [(1, 6), (1, 6)]


@pytest.mark.parametrize(
    ("name", "gate"),
    [("silu", silu_mul), ("gelu_pytorch_tanh", gelu_tanh_mul), ("relu", None), ("relu2", None)],
)
def test_gates_are_known_by_their_activations(name: str, gate: object) -> None:
    act = ACT2FN[name]

    assert GATES.get(activation_of(act)) is gate
    if gate is not None:
        x, up = torch.randn(3, 8), torch.randn(3, 8)
        assert torch.allclose(gate(x, up), act(x) * up, atol=1e-6)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_keeps_the_dtype_of_its_rows(dtype: torch.dtype) -> None:
    norm = RmsNorm(torch.rand(16), 1e-6)
    x, stream = torch.randn(3, 16).to(dtype), torch.randn(3, 16).to(dtype)

    normed, total = norm.of_sum(x.clone(), stream)

    assert norm(x).dtype == normed.dtype == total.dtype == dtype
    assert torch.equal(total, x + stream)
