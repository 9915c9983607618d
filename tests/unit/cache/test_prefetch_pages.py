"""Reading ahead: the files of a context's packs and no others; the store stays as it was."""

import os
from pathlib import Path

import pytest

from kvchat.cache.disk.inventory import prefetch_pages
from kvchat.cache.tier import Layout
from support.pack_chains import LAYOUT, open_tier, payload_files, save

CONTEXT = list(range(1, 21))
OTHER = Layout(identity=b"model of others.", block_size=2, block_bytes=40_000)


def state_of(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tier = open_tier(tmp_path)
    for end in (6, 14, 20):
        assert save(tier, CONTEXT[:end])
    assert save(tier, [*CONTEXT[:6], 99, 98, 97, 96])
    tier.close()
    return tmp_path


def test_a_contexts_packs_are_read_and_no_others(store: Path) -> None:
    before = state_of(store)
    sizes = sorted(path.stat().st_size for path in payload_files(store))
    of_context = 10 * LAYOUT.block_bytes

    assert prefetch_pages(store, CONTEXT, 2) == of_context
    assert prefetch_pages(store, [*CONTEXT[:14], 7, 7], 2) <= 7 * LAYOUT.block_bytes
    assert prefetch_pages(store, [5, 5, 5, 5], 2) == 0
    assert sum(sizes) > of_context
    assert state_of(store) == before


def test_the_model_dir_used_last_is_the_likeliest(store: Path) -> None:
    tier = open_tier(store, layout=OTHER)
    assert save(tier, CONTEXT[:4], OTHER)
    tier.close()
    [table] = store.glob(f"{OTHER.identity.hex()}/*.db")

    os.utime(table, (1e9, 1e9))
    assert prefetch_pages(store, CONTEXT, 2) > 9 * LAYOUT.block_bytes
    os.utime(table, (4e9, 4e9))
    assert prefetch_pages(store, CONTEXT, 2) < 3 * LAYOUT.block_bytes


def test_files_are_read_where_the_system_cannot_be_asked_to(store, monkeypatch):
    """macOS has no posix_fadvise."""
    monkeypatch.delattr(os, "posix_fadvise")

    assert prefetch_pages(store, CONTEXT, 2) > 9 * LAYOUT.block_bytes


@pytest.mark.parametrize("block_size", [1, 16])
def test_another_block_size_finds_nothing(store: Path, block_size: int) -> None:
    assert prefetch_pages(store, CONTEXT, block_size) == 0


def test_what_is_broken_is_no_reason_to_fail(store: Path, tmp_path: Path) -> None:
    assert prefetch_pages(tmp_path / "nowhere", CONTEXT, 2) == 0
    for path in payload_files(store):
        path.unlink()
    assert prefetch_pages(store, CONTEXT, 2) == 0
    for table in store.glob("*/*.db"):
        table.write_bytes(b"not a table at all" * 400)
    assert prefetch_pages(store, CONTEXT, 2) == 0
