"""The self-test of packed weights on a GPU: it sees kernels that are wrong there."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvchat.core.errors import ModelUnsupported
from kvchat.model.packed import product_test
from kvchat.model.packed.product_test import device_forms, product_fault
from kvchat.model.self_test import ensure_trusted
from support.gpu_packs import load_packed_as_on_gpu

Product = Callable[..., torch.Tensor]


def wrong_for(num_rows: int, by: Product) -> Product:
    """Return a product that is wrong for so many rows: its first output is another's."""

    def multiply(x: torch.Tensor, *args: object, **how: object) -> torch.Tensor:
        out = by(x, *args, **how)
        is_tested = len(x) == num_rows and how.get("impl") != "reference"
        return out.roll(1, dims=1) if is_tested else out

    return multiply


def no_numbers(x: torch.Tensor, *args: object) -> torch.Tensor:
    return product_test.dequantised(args[0]).new_full((len(x), 1), float("nan"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_right_products_pass(name, weights, tmp_path, monkeypatch, memory):
    loaded = load_packed_as_on_gpu(tmp_path, name, weights, monkeypatch)

    assert product_fault(loaded.module, torch.bfloat16) is None
    ensure_trusted(loaded, memory)
    assert len(device_forms(loaded.module)) >= 2, "the head has other inputs than the last product"


@pytest.mark.parametrize("num_rows", [1, 2, 17])
def test_a_wrong_product_is_refused_in_words(num_rows, tmp_path, monkeypatch, memory):
    loaded = load_packed_as_on_gpu(tmp_path, "llama", "int4", monkeypatch)
    monkeypatch.setattr(
        product_test, "block_linear", wrong_for(num_rows, product_test.block_linear)
    )

    with pytest.raises(ModelUnsupported, match=f"weights of 4 bits, {num_rows} rows") as raised:
        ensure_trusted(loaded, memory)

    assert "--weights auto" in str(raised.value.hint)
    with pytest.raises(ModelUnsupported) as raised:
        ensure_trusted(replace(loaded, weights="blocks"), memory)
    assert "--dtype bfloat16" in str(raised.value.hint)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_wrong_experts_are_seen(num_rows, tmp_path, monkeypatch):
    loaded = load_packed_as_on_gpu(tmp_path, "qwen3_moe", "int4", monkeypatch)
    monkeypatch.setattr(
        product_test, "block_experts", wrong_for(num_rows, product_test.block_experts)
    )

    assert product_fault(loaded.module, loaded.dtype) == f"experts of 4 bits, {num_rows} rows"


def test_what_is_no_number_or_raises_is_refused(tmp_path, monkeypatch, memory):
    loaded = load_packed_as_on_gpu(tmp_path, "llama", "int8", monkeypatch)
    monkeypatch.setattr(product_test, "block_linear", no_numbers)
    assert product_fault(loaded.module, loaded.dtype) is not None

    def raises(*_: object) -> torch.Tensor:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(product_test, "block_linear", raises)
    with pytest.raises(ModelUnsupported, match="its kernels raise RuntimeError"):
        ensure_trusted(loaded, memory)


def test_other_blocks_of_the_same_model_are_tested_too(tmp_path, monkeypatch, memory):
    """Files of one model have blocks of many formats, and all are called `blocks`."""
    one = load_packed_as_on_gpu(tmp_path / "a", "llama", "int8", monkeypatch)
    other = load_packed_as_on_gpu(tmp_path / "b", "llama", "int4", monkeypatch)
    ensure_trusted(replace(one, weights="blocks"), memory)
    monkeypatch.setattr(product_test, "block_linear", wrong_for(1, product_test.block_linear))

    ensure_trusted(replace(one, weights="blocks"), memory)  # known to pass
    with pytest.raises(ModelUnsupported):
        ensure_trusted(replace(other, weights="blocks"), memory)
