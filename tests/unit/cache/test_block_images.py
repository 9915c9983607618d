"""Block images: what was gathered and scattered is bit for bit what was there."""

from typing import Any

import pytest
import torch

from kvchat.cache import kv_pool
from kvchat.cache.kv_pool import KvGeometry, KvPool, LayerGeometry

GEOMETRIES = {
    "one layer": (LayerGeometry(2, 8, 8),),
    "keys wider than values": (LayerGeometry(1, 24, 16), LayerGeometry(1, 24, 16)),
    "layers that differ": (LayerGeometry(4, 8, 8), LayerGeometry(1, 32, 32)),
}


def filled_pool(layers: tuple[LayerGeometry, ...], dtype: torch.dtype) -> KvPool:
    pool = KvPool(KvGeometry(layers, dtype, block_size=4), 12, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for tensors in pool.layers:
        for tensor in tensors:
            bits = torch.randint(0, 256, tensor.view(torch.uint8).shape, generator=generator)
            tensor.view(torch.uint8).copy_(bits)  # NaNs and all
    return pool


def contents(pool: KvPool, block: int) -> list[torch.Tensor]:
    return [tensor[block].view(torch.uint8).clone() for pair in pool.layers for tensor in pair]


@pytest.mark.parametrize("blocks", [[3], [2, 3, 4, 5], [7, 1, 11, 2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layers", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_round_trip_through_images_changes_no_bit(layers, dtype, blocks):
    source, target = (
        filled_pool(layers, dtype),
        KvPool(KvGeometry(layers, dtype, 4), 12, torch.device("cpu")),
    )
    elsewhere = [block - 1 for block in blocks] if 11 in blocks else [block + 4 for block in blocks]

    image = source.gather(blocks)
    target.scatter(elsewhere, image)

    assert len(image) == len(blocks) * source.geometry.block_bytes
    for before, after in zip(blocks, elsewhere, strict=True):
        for one, other in zip(contents(source, before), contents(target, after), strict=True):
            assert torch.equal(one, other)
    untouched = set(range(12)) - set(elsewhere)
    assert not any(part.any() for block in untouched for part in contents(target, block))


def test_images_of_several_blocks_are_the_images_of_each_one_after_another() -> None:
    pool = filled_pool((LayerGeometry(2, 8, 4), LayerGeometry(2, 8, 4)), torch.bfloat16)

    assert bytes(pool.gather([5, 2])) == bytes(pool.gather([5])) + bytes(pool.gather([2]))


def test_an_image_is_layer_after_layer_keys_before_values() -> None:
    pool = filled_pool((LayerGeometry(2, 8, 4), LayerGeometry(1, 4, 4)), torch.float32)
    parts = contents(pool, 6)

    assert bytes(pool.gather([6])) == b"".join(bytes(part.flatten().tolist()) for part in parts)


def test_an_image_is_the_callers_own() -> None:
    pool = filled_pool((LayerGeometry(1, 4, 4),), torch.float32)
    image = bytes(pool.gather([1])), pool.gather([1])

    pool.layers[0][0].zero_()

    assert bytes(image[1]) == image[0]


@pytest.mark.parametrize("dims", [(8, 8), (8, 6)])
def test_a_drift_is_what_differs_in_one_token_over_the_usual_length(dims: tuple[int, int]) -> None:
    """Against the definition, tensor by tensor; with dims alike they are all done at once."""
    torch.manual_seed(0)
    geometry = KvGeometry((LayerGeometry(2, *dims),) * 3, torch.float32, 4)
    pool = KvPool(geometry, 5, torch.device("cpu"))
    for pair in pool.layers:
        for tensor in pair:
            tensor.normal_()
            tensor[3] = tensor[1]
    assert not pool.kv_error(1, 3, 2)[:, :2].any()
    pool.layers[1][1][3, 2, 0, 1] += 0.5
    pool.layers[2][0][3, 2] *= 1.25
    pool.layers[2][0][3, 1] += 100.0  # another token's

    found = pool.kv_error(1, 3, 2)

    naive = []
    for tensor in (tensor for pair in pool.layers for tensor in pair):
        known, off = tensor[1].flatten(1), (tensor[3, 2] - tensor[1, 2]).flatten()
        usual = float(known.norm(dim=1).square().mean())
        naive.append([float(part @ other) / usual for part, other in both(off, known[2])])
    assert torch.allclose(found, torch.tensor(naive))
    assert found[4, 1] / found[4, 2] == pytest.approx(0.25)
    pool.layers[0][0][3, 2] = float("nan")
    assert not pool.kv_error(1, 3, 2).isfinite().all()


def both(off: torch.Tensor, own: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(off, off), (off, own), (own, own)]


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("looked_at", [1, 1 << 20], ids=["block by block", "all at once"])
def test_leading_blocks_that_hold_numbers_are_counted_as_one_by_one(name, looked_at, monkeypatch):
    """Asking tensor by tensor held a GPU up for seconds, where a long prompt had failed."""
    monkeypatch.setattr("kvchat.cache.kv_pool._LOOKED_AT_BYTES", looked_at)
    pool = KvPool(KvGeometry(GEOMETRIES[name], torch.bfloat16, 4), 12, torch.device("cpu"))
    order = [7, 3, 9, 1, 4]
    assert pool.num_finite([]) == 0
    assert pool.num_finite(order) == 5
    for index, value in ((3, float("inf")), (1, float("nan"))):
        pool.layers[-1][1][order[index], 3, 0, 2] = value

        naive = [pool.is_finite(block, 4) for block in order].index(False)
        assert pool.num_finite(order) == naive == index


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_warm_up_runs_every_kind_of_copy_and_changes_nothing(name, monkeypatch):
    """On a GPU a copy was first compiled while a promotion waited for it, and given up for that."""
    pool = filled_pool(GEOMETRIES[name], torch.float16)
    before = [contents(pool, block) for block in range(pool.num_blocks)]
    used = set[str]()
    for kind in ("copy_blocks", "gather_blocks", "scatter_blocks"):
        run = getattr(kv_pool, kind)

        def noted(*args: Any, run: Any = run, kind: str = kind) -> None:
            used.add(kind)
            run(*args)

        monkeypatch.setattr(kv_pool, kind, noted)

    pool.warm_up()

    assert used == {"copy_blocks", "gather_blocks", "scatter_blocks"}
    for block, tensors in enumerate(before):
        for now, then in zip(contents(pool, block), tensors, strict=True):
            assert torch.equal(now, then)
