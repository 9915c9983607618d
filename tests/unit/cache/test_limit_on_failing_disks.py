"""The limit holds on a disk that fails: a pack is written only where there really is room for it.

What cannot be deleted still takes its place, and what cannot be looked at may take any.
"""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvchat.cache.disk.tier import DiskTier
from support.failing_files import Faults, StuckFiles
from support.pack_chains import (
    LAYOUT,
    keys_of,
    num_found,
    open_tier,
    payload_files,
    restored,
    save,
    used_bytes,
)

IDS = [1, 2, 3, 4, 5, 6]
LIMIT = 5 << 20
OTHER = replace(LAYOUT, identity=b"another model...")


def large(number: int) -> list[int]:
    """Return a context whose one pack takes 800 kB."""
    return [number, *range(39)]


def full(directory: Path) -> DiskTier:
    """Return a tier that has had to forget something, so that it will have to again."""
    tier = open_tier(directory, LIMIT)
    for number in range(6):
        assert save(tier, large(number))
    assert num_found(tier, large(0)) == 0
    return tier


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> StuckFiles:
    return StuckFiles(monkeypatch)


def test_the_limit_counts_files_that_could_not_be_deleted(tmp_path, stuck):
    """They were no longer in the table, so that others were written in what was their place."""
    tier = open_tier(tmp_path, LIMIT)
    stuck.endings = (".kv",)
    for number in range(80):
        save(tier, [number, *IDS, 7])
        assert used_bytes(tmp_path) <= LIMIT
    assert len(payload_files(tmp_path)) > 20

    stuck.endings = ()

    assert save(tier, IDS)
    assert restored(tier, IDS) == 3


def test_a_pack_is_not_written_where_what_was_forgotten_for_it_stays(tmp_path, stuck):
    """What had failed was noticed by the next write, and this one had already been done."""
    tier = full(tmp_path)
    stuck.endings = (".kv",)

    assert not save(tier, large(6))

    assert used_bytes(tmp_path) <= LIMIT
    assert num_found(tier, large(5)) == 20, "all were forgotten for room that did not come"
    stuck.endings = ()
    assert save(tier, large(6))
    assert restored(tier, large(6)) == 20


def test_a_table_that_is_opened_again_counts_what_could_not_be_deleted(tmp_path, stuck):
    """Another thread opens the table again, and that had forgotten that files were left."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
        tier = one.submit(full, tmp_path).result()
        stuck.endings = (".kv",)
        for number in range(6, 12):
            thread = (one, another)[number % 2]
            thread.submit(tier.forget, keys_of(tier, large(number - 1))[:1]).result()
            thread = (another, one)[number % 2]
            thread.submit(save, tier, large(number)).result()
            assert used_bytes(tmp_path) <= LIMIT


def test_a_pack_that_is_cut_is_not_written_beside_itself(tmp_path: Path, stuck: StuckFiles) -> None:
    """There is room for the shorter one only where the longer one is gone."""
    tier = full(tmp_path)
    for number in range(8):
        assert save(tier, [100 + number, *IDS, 7])
    stuck.endings = (".kv",)

    tier.forget(keys_of(tier, large(5))[-1:])

    assert used_bytes(tmp_path) <= LIMIT
    assert num_found(tier, large(5)) == 0


def test_a_process_that_could_not_delete_tells_the_next(tmp_path: Path, stuck: StuckFiles) -> None:
    """Two processes of one model share a table, and what that counts."""
    tier, other = full(tmp_path), open_tier(tmp_path, LIMIT)
    stuck.endings = (".kv",)
    tier.forget(keys_of(tier, large(5)))

    assert not save(other, large(6))

    assert used_bytes(tmp_path) <= LIMIT
    stuck.endings = ()
    assert save(other, large(6))


@pytest.mark.parametrize("ending", [".kv", f"{OTHER.identity.hex()}.kvchat"])
def test_what_cannot_be_looked_at_is_not_taken_for_nothing(tmp_path, monkeypatch, ending):
    """Where a look at another model's files failed, they counted nothing."""
    other = open_tier(tmp_path, LIMIT, OTHER)
    for number in range(4):
        assert save(other, large(number), OTHER)
    other.close()
    tier = open_tier(tmp_path, LIMIT)
    stat = os.stat

    def failing(path: str | Path, **settings: Any) -> os.stat_result:
        if str(path).endswith(ending):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", failing)
        for number in range(4):
            assert not save(tier, large(number))
    assert used_bytes(tmp_path) <= LIMIT
    assert save(tier, IDS)


def test_a_failing_look_makes_no_model_directory_old_or_free_of_pins(tmp_path, monkeypatch):
    """Where it could not be seen when a table was last used it was taken for fifty years old."""
    other = open_tier(tmp_path, LIMIT, OTHER)
    assert save(other, large(0), OTHER)
    other.close()
    kept = payload_files(tmp_path)
    tier = open_tier(tmp_path, LIMIT)
    faults = Faults()
    faults.install(monkeypatch)
    for number in range(120):
        with faults.armed(fail_at=number):
            tier.gc()
        assert payload_files(tmp_path) == kept, f"call {number} failed"
    assert faults.num_failed == 0, "not every call was tried"
