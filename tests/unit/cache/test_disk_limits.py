"""DiskTier: a prompt finds what was kept of its beginning, and never anything else."""

import os
import random
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.cache.disk import quota
from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.db import LOCK_NAME
from kvchat.cache.disk.model_dirs import set_last_used
from kvchat.cache.disk.payload_files import PayloadFiles
from kvchat.cache.disk.quota import least_bytes
from kvchat.cache.keys import encode_ids
from kvchat.cache.tier import DamagedRecord, Layout, PackHead
from support.clock import Clock
from support.pack_chains import (
    LAYOUT,
    ROOM,
    find,
    image_of,
    keys_of,
    num_found,
    open_tier,
    payload_files,
    restored,
    save,
    used_bytes,
)

OTHER = replace(LAYOUT, identity=b"another model...")


def test_a_context_comes_back_after_the_tier_was_closed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert save(tier, [1, 2, 3, 4, 5])
    assert save(tier, [1, 2, 3, 4, 5, 6, 7, 8])
    tier.close()

    again = open_tier(tmp_path)

    assert [found.num_blocks for found in find(again, [1, 2, 3, 4, 5, 6, 7, 8, 9])] == [2, 2]
    assert restored(again, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


def test_a_branch_inside_a_pack_shares_what_it_has_in_common(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    save(tier, [1, 2, 3, 4, 5, 6, 7, 8])
    save(tier, [1, 2, 3, 4, 9, 9, 9, 9])

    assert restored(tier, [1, 2, 3, 4, 9, 9, 9, 9]) == 4
    assert restored(tier, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert restored(tier, [1, 2, 3, 4, 7, 7]) == 2
    assert restored(tier, [2, 2]) == 0


@pytest.mark.parametrize("theirs", [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 9, 9]], ids=str)
def test_a_shorter_pack_that_another_process_wrote_meanwhile_is_continued(tmp_path, theirs):
    """It counted as all that was to be written, and the rest was never kept."""
    tier, ids = open_tier(tmp_path), [1, 2, 3, 4, 5, 6, 7, 8]
    keys = keys_of(tier, ids)
    assert find(tier, ids) == []
    save(open_tier(tmp_path), theirs)

    assert tier.write(PackHead(tier.root, encode_ids(ids)), memoryview(image_of(keys)))

    assert restored(tier, ids) == 4
    assert restored(tier, theirs) == len(theirs) // 2
    assert tier.status().num_packs == 2


@pytest.mark.parametrize(
    "other", [OTHER, replace(LAYOUT, block_size=4), replace(LAYOUT, block_bytes=20_000)]
)
def test_another_model_or_geometry_in_the_same_directory_finds_nothing(tmp_path, other):
    save(open_tier(tmp_path), [1, 2, 3, 4])

    assert find(open_tier(tmp_path, layout=other), [1, 2, 3, 4], other) == []
    assert restored(open_tier(tmp_path), [1, 2, 3, 4]) == 2


def test_a_key_that_collides_does_not_answer_for_other_ids(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    save(tier, [1, 2, 3, 4])

    assert tier.find(keys_of(tier, [1, 2, 3, 4]), encode_ids([9, 9, 9, 9])) == []


def test_files_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        tier = open_tier(tmp_path / "made" / "kv")
        save(tier, [1, 2, 3, 4])
    finally:
        os.umask(mask)
    names = {path.name for path in (tmp_path / "made").rglob("*")}
    assert {LOCK_NAME, "cache.db", "cache.db-wal", "cache.db-shm"} <= names
    for path in (tmp_path / "made").rglob("*"):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_file_of_somebody_elses_is_not_read(tmp_path, monkeypatch):
    """Tables and directories of others were refused, and their packs were read."""
    files = PayloadFiles(tmp_path)
    name = files.write(memoryview(b"KV"))
    assert files.read(name, lambda n: memoryview(bytearray(n))) == b"KV"

    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert files.read(name, lambda n: memoryview(bytearray(n))) == b""


@pytest.mark.parametrize("name", ["../../x", "cache.db", "/etc/passwd", None, 7])
def test_only_files_with_names_of_ours_are_read_or_removed(tmp_path: Path, name: object) -> None:
    (tmp_path / "cache.db").write_bytes(b"the table")
    files = PayloadFiles(tmp_path)

    assert files.read(name, lambda n: memoryview(bytearray(n))) == b""
    files.remove(name)
    assert (tmp_path / "cache.db").read_bytes() == b"the table"


def test_a_read_pack_that_was_exchanged_meanwhile_is_never_another_contexts(tmp_path):
    """Both begin with the same block, so both have the same name; they go on differently."""
    reader, other = open_tier(tmp_path), open_tier(tmp_path)
    save(reader, [1, 2, 3, 4, 5, 6])
    [found] = find(reader, [1, 2, 3, 4, 5, 6])
    other.forget([found.key])
    save(other, [1, 2, 7, 8, 9, 9])

    with pytest.raises(DamagedRecord):
        reader.read(found)
    assert restored(other, [1, 2, 7, 8, 9, 9]) == 3


def test_a_full_store_never_forgets_the_prefix_of_what_it_is_given(tmp_path: Path) -> None:
    """A chain longer than the store: what cannot be kept is not written, its beginning stays.

    It once lost the pack that the next one was to continue.
    """
    tier, kept = open_tier(tmp_path, limit_bytes=4 << 20), 0
    ids: list[int] = []
    for turn in range(40):
        ids += [turn] * 2 * 4
        save(tier, ids)
        assert num_found(tier, ids) >= max(kept, 1)
        kept = num_found(tier, ids)
        assert used_bytes(tmp_path) <= 4 << 20

    assert not tier.status().num_evicted


def test_the_limit_holds_while_ten_times_as_much_is_written(tmp_path: Path) -> None:
    limit = 5 << 20
    tier = open_tier(tmp_path, limit)
    rng = random.Random(5)
    written = 0
    while written < 10 * limit:
        ids = [rng.randint(0, 2) for _ in range(2)] + [rng.randint(0, 999) for _ in range(10)]
        assert save(tier, ids)
        assert used_bytes(tmp_path) <= limit
        assert restored(tier, ids) == 6
        written = tier.status().bytes_written
    assert tier.status().num_evicted > 100


@pytest.mark.parametrize("num_mib", [8, 24])
def test_at_most_a_twentieth_of_a_limit_stays_unused(tmp_path: Path, num_mib: int) -> None:
    """Of every limit 2 MiB were set aside for tables: of 8 MiB a quarter, of 4 MiB a half."""
    limit = num_mib << 20
    tier = open_tier(tmp_path, limit)
    rng, most = random.Random(num_mib), 0
    while tier.status().num_evicted < 100:
        assert save(tier, [rng.randint(0, 99_999) for _ in range(2 * rng.randint(1, 4))])
        most = max(most, used_bytes(tmp_path))

    assert 0.95 * limit <= most <= limit


def test_a_limit_below_one_pack_writes_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, limit_bytes=50_000)

    assert not save(tier, [1, 2, 3, 4])
    assert payload_files(tmp_path) == []
    assert "allows only" in tier.status().trouble


def test_what_another_model_left_goes_before_what_this_one_just_wrote(tmp_path: Path) -> None:
    """The limit is shared. Who changes models must not find the new one's cache always empty."""
    limit = 6 << 20
    first = open_tier(tmp_path, limit, OTHER)
    for number in range(40):
        save(first, [number] * 6, OTHER)
    first.close()
    tier = open_tier(tmp_path, limit)
    ids: list[int] = []
    for turn in range(10):
        ids += [turn] * 4
        assert save(tier, ids)
        assert num_found(tier, ids) == len(ids) // 2
        assert used_bytes(tmp_path) <= limit


def test_a_full_store_lists_the_other_models_once_for_all_packs_that_go(tmp_path, monkeypatch):
    """All model directories were listed for each pack that went, while the store was locked."""
    tier = open_tier(tmp_path)
    for start in range(0, 400, 2):
        save(tier, [start, start + 1])
    tier.close()
    num_listed = []
    listed = quota.list_model_dirs

    def counted(directory: Path) -> list[Path]:
        num_listed.append(1)
        return listed(directory)

    monkeypatch.setattr(quota, "list_model_dirs", counted)
    shrunk = open_tier(tmp_path, limit_bytes=ROOM // 2)

    assert shrunk.status().num_evicted > 40
    assert len(num_listed) < 20


def test_a_store_whose_limit_was_lowered_shrinks_at_the_next_opening(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(30):
        save(tier, [number] * 6)
    tier.close()
    assert used_bytes(tmp_path) > 3 << 20

    open_tier(tmp_path, limit_bytes=3 << 20)

    assert used_bytes(tmp_path) <= 3 << 20


def test_files_that_a_killed_process_left_count_and_go(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    save(tier, [1, 2, 3, 4])
    tier.close()
    [payload] = payload_files(tmp_path)
    orphan = payload.with_name("f" * 32 + ".kv")
    orphan.write_bytes(bytes(1 << 20))

    again = open_tier(tmp_path)

    assert again._quota.used_bytes(again._db.table) >= used_bytes(tmp_path)
    again.gc()
    assert payload_files(tmp_path) == [payload]
    assert restored(again, [1, 2, 3, 4]) == 2


def test_random_actors_agree_with_a_set_of_prefixes(tmp_path: Path) -> None:
    """Without eviction a tier knows exactly the prefixes that were saved, through any of two."""
    rng = random.Random(11)
    tiers = [open_tier(tmp_path, 1 << 30) for _ in range(2)]
    known: set[bytes] = set()
    for _ in range(300):
        ids = [rng.randint(0, 1) for _ in range(rng.randint(0, 14))]
        tier = rng.choice(tiers)
        keys = keys_of(tier, ids)
        expected = next((n for n, key in enumerate(keys) if key not in known), len(keys))
        if rng.random() < 0.5:
            assert save(tier, ids)
            known.update(keys)
        else:
            assert restored(tier, ids) == expected
    assert tiers[0].status().num_damaged == tiers[1].status().num_damaged == 0
    assert tiers[0].verify()[1] == 0


def test_what_else_is_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    """Every directory was taken for an old model directory: `--cache-dir ~` would have emptied a
    home.

    A store opened in a directory of the user's deleted what was in it, at once.
    """
    letters = tmp_path / "letters" / "from home"
    letters.mkdir(parents=True)
    (letters / "one.txt").write_text("dear")

    tier = open_tier(tmp_path, limit_bytes=1)
    save(tier, [1, 2, 3, 4])
    tier.gc()

    assert (letters / "one.txt").read_text() == "dear"


def test_old_model_dirs_go(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    save(tier, [1, 2, 3, 4])
    tier.close()

    old = tmp_path / LAYOUT.identity.hex()
    for num_days, is_kept in ((0, True), (13, True), (15, False)):
        open_tier(tmp_path, layout=OTHER).close()  # it was used just now
        if old.exists():
            set_last_used(old, time.time() - num_days * 86400.0)
        open_tier(tmp_path, layout=OTHER).close()
        assert old.exists() == is_kept


def test_a_clock_that_jumps_deletes_nothing(tmp_path: Path) -> None:
    """A start with the clock 14 years ahead deleted all KV, that of other models too."""
    ids, later = [1, 2, 3, 4], [5, 6, 7, 8]
    for layout in (LAYOUT, OTHER):
        tier = open_tier(tmp_path, layout=layout)
        save(tier, ids, layout)
        tier.close()

    for _ in range(2):
        tier = open_tier(tmp_path, clock=lambda: time.time() + 14 * 365 * 86400.0)
        assert restored(tier, ids) == 2
        save(tier, later)
        tier.close()
    assert (tmp_path / OTHER.identity.hex()).exists()

    tier = open_tier(tmp_path)  # the clock is right again
    assert restored(tier, ids) == restored(tier, later) == 2
    newest_s = tier._db.table.newest_use_s()
    assert newest_s <= time.time() + 60.0, "nothing stays dear for 14 years"


def test_a_pause_makes_nothing_older_than_a_week(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock=clock)
    save(tier, [1, 2, 3, 4])
    clock.now_s += 25 * 86400.0
    save(tier, [5, 6, 7, 8])
    tier.close()

    clock.now_s += 4 * 86400.0  # of 29 days without a use
    assert open_tier(tmp_path, clock=clock).status().num_packs == 2
    clock.now_s += 40 * 86400.0  # now one has 32 days, for a pause is a week at most
    assert open_tier(tmp_path, clock=clock).status().num_packs == 1


def test_what_was_asked_once_goes_before_what_is_older(tmp_path: Path) -> None:
    """A night of scripts once pushed out the conversations of the day before."""
    limit, clock = 5 << 20, Clock(1e9)
    chat = open_tier(tmp_path, limit, clock=clock)
    for number in range(5):
        save(chat, [number] * 12)
    chat.close()
    clock.now_s += 3600.0
    scripts = open_tier(tmp_path, limit, clock=clock)
    for number in range(10, 60):
        clock.now_s += 100.0
        assert save(scripts, [number] * 12, is_one_shot=True)

    assert scripts.status().num_evicted > 20
    assert [num_found(scripts, [number] * 12) for number in range(5)] == [6] * 5


def test_what_a_prompt_has_found_is_not_evicted_while_it_comes_up(tmp_path: Path) -> None:
    """Room was made before it was noted what had been found: an old conversation, being restored
    while another was saved, was what went.
    """
    clock = Clock(1e9)
    tier = open_tier(tmp_path, 8 << 20, clock=clock)
    for number in range(5):
        clock.now_s += 1000.0
        save(tier, [number] * 12)
    clock.now_s += 1000.0
    assert num_found(tier, [0] * 12) == 6
    tier._quota.limit_bytes = tier._quota.used_bytes(tier._db.table)

    assert save(tier, [9] * 12)

    assert tier.status().num_evicted > 0
    assert restored(tier, [0] * 12) == 6


def test_a_tier_says_that_it_holds_what_whoever_looks_from_outside_says(tmp_path: Path) -> None:
    """What is set aside for tables was told as used: 2.58 MiB where it was 630 KiB."""
    tier = open_tier(tmp_path)
    other = replace(LAYOUT, identity=b"another model...")
    small = Layout(b"small model.....", block_size=2, block_bytes=16)  # its packs are in its table
    for layout in (other, small):
        save(open_tier(tmp_path, layout=layout), [7] * 8, layout)
    small_tier = open_tier(tmp_path, layout=small)
    assert tier.status().num_bytes == StoreAdmin(tmp_path).status().num_bytes
    for number in range(4):
        save(tier, [number] * 12)
    tier.pin(keys_of(tier, [2] * 12), encode_ids([2] * 12), "mine")
    tier.quarantine(keys_of(tier, [3] * 12))

    found = StoreAdmin(tmp_path).status()

    assert StoreAdmin(tmp_path).num_bytes() == found.num_bytes
    assert sum(model_dir.num_packs for model_dir in found.model_dirs) == 5
    assert tier.status().num_bytes == small_tier.status().num_bytes == found.num_bytes
    assert found.num_bytes < tier._quota.used_bytes(tier._db.table)


def test_pins_outlast_everything_and_yield_to_the_limit_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 5 << 20)
    ids = [7] * 20
    save(tier, ids[:8])
    save(tier, ids)
    assert tier.pin(keys_of(tier, ids), encode_ids(ids), "mine") == 10
    for number in range(100, 180):
        save(tier, [number] * 12)
    assert tier.status().num_evicted > 20
    assert num_found(tier, ids) == 10
    tier.close()

    clock = Clock(time.time())
    for _ in range(6):  # a longer pause counts as a week
        clock.now_s += 6 * 86400.0
        far = open_tier(tmp_path, 5 << 20, clock=clock)
        assert num_found(far, ids) == 10, "time to live is not for pins"
        num_packs = far.status().num_packs
        far.close()
    assert num_packs == 2
    other = open_tier(tmp_path, 5 << 20, replace(LAYOUT, identity=b"another model..."))
    other.gc()
    other.close()
    small = open_tier(tmp_path, least_bytes(1000))
    assert used_bytes(tmp_path) <= least_bytes(1000)
    assert "what is pinned was more than --disk-cache" in small.status().trouble


def test_where_pins_fill_the_store_a_write_says_so(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 4 << 20)
    for number in range(30):
        ids = [number] * 12
        if save(tier, ids):
            tier.pin(keys_of(tier, ids), encode_ids(ids), f"{number}")

    assert not save(tier, [99] * 12)
    assert "what is pinned fills --disk-cache" in tier.status().trouble
    for label in "012":
        tier.unpin(label)
    assert save(tier, [99] * 12)


def test_forgetting_cuts_packs_that_hold_others_too(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    save(tier, [1, 2, 3, 4, 5, 6])
    save(tier, [1, 2, 3, 4, 5, 6, 7, 8])
    save(tier, [1, 2, 9, 9])

    assert tier.forget(keys_of(tier, [1, 2, 3, 4])[1:]) == 3

    assert restored(tier, [1, 2, 3, 4, 5, 6, 7, 8]) == 1
    assert restored(tier, [1, 2, 9, 9]) == 2
    assert tier.verify() == (2, 0)
    assert tier.forget(keys_of(tier, [5, 5])) == 0


def test_whatever_goes_no_pack_loses_what_it_continues(tmp_path: Path) -> None:
    """Random chats, pins and forgetting on a store that is too small, looked at after each deed."""
    rng = random.Random(17)
    limit = 5 << 20
    tier = open_tier(tmp_path, limit)
    for _ in range(150):
        ids = [rng.randint(0, 1) for _ in range(6)] + [rng.randint(0, 5) for _ in range(12)]
        ids = ids[: rng.choice([8, 12, 18])]
        save(tier, ids)
        if rng.random() < 0.05:
            tier.pin(keys_of(tier, ids), encode_ids(ids), rng.choice("ab"))
        if rng.random() < 0.05:
            tier.forget(keys_of(tier, ids)[-2:])
        if rng.random() < 0.02:
            tier.unpin("a")
        assert used_bytes(tmp_path) <= limit
        packs = tier._reader.known_packs(tier._db.table)
        blocks = {tier.root, *(key for known in packs.values() for key in known.keys)}
        assert all(known.parent in blocks for known in packs.values())
    assert tier.status().num_evicted > 0
    assert tier.verify()[1] == 0


def test_a_use_is_remembered_and_so_is_what_followed(tmp_path: Path) -> None:
    clock = Clock(1e9)
    tier = open_tier(tmp_path, 8 << 20, clock=clock)
    save(tier, [1, 2, 3, 4])
    save(tier, [9, 9])
    for number in range(3):
        clock.now_s += 3600.0
        find(tier, [9, 9])
        save(tier, [1, 2, 3, 4, number, number])
    name = keys_of(tier, [1, 2])[0]

    use = tier._reader.known_packs(tier._db.table)[name].use

    assert (use.num_uses, use.num_followed, use.last_s) == (4, 3, clock.now_s)
    assert use.credit_s > clock.now_s
