"""The disk tier: it gives back what it was given, or nothing; its limit holds; it never raises."""

import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvchat.cache.disk.model_dirs import set_last_used
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import chain_keys, encode_ids
from kvchat.cache.tier import DamagedRecord, Layout, PackHead
from kvchat.core.errors import StoreError

LAYOUT = Layout(identity=bytes(range(16)), block_size=4, block_bytes=512)
MIB = 1 << 20
OpenTier = Callable[..., DiskTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    opened: list[DiskTier] = []

    def open_(limit: int = 64 * MIB, layout: Layout = LAYOUT, **settings: object) -> DiskTier:
        tier = DiskTier(tmp_path / "kv", layout, limit, **{"min_free_bytes": 0, **settings})
        opened.append(tier)
        return tier

    yield open_
    for tier in opened:
        tier.close()


def image_of(encoded: bytes, layout: Layout = LAYOUT) -> memoryview:
    """Images that follow from all token ids up to each block, as KV does."""
    keys = chain_keys(b"", encoded, layout.ids_bytes)
    return memoryview(b"".join(random.Random(key).randbytes(layout.block_bytes) for key in keys))


class Writer:
    """Writes contexts as a conversation does: each time what is new, as one pack."""

    def __init__(self, tier: DiskTier, layout: Layout = LAYOUT) -> None:
        self.tier, self.layout = tier, layout

    def write(self, ids: list[int]) -> bool:
        encoded = encode_ids(ids)
        encoded = encoded[: len(encoded) // self.layout.ids_bytes * self.layout.ids_bytes]
        keys = chain_keys(self.tier.root, encoded, self.layout.ids_bytes)
        known = sum(found.num_blocks for found in self.tier.find(keys, encoded))
        if known == len(keys):
            return True
        parent = keys[known - 1] if known else self.tier.root
        head = PackHead(parent, encoded[known * self.layout.ids_bytes :])
        image = image_of(encoded, self.layout)[known * self.layout.block_bytes :]
        return self.tier.write(head, image)

    def restored(self, ids: list[int]) -> int:
        """Read what there is of a context; return its blocks. Wrong bytes fail the test."""
        encoded = encode_ids(ids)
        keys = chain_keys(self.tier.root, encoded, self.layout.ids_bytes)
        right = image_of(encoded, self.layout)
        num_blocks = 0
        for found in self.tier.find(keys, encoded):
            assert found.start_block == num_blocks
            try:
                image = self.tier.read(found)
            except DamagedRecord:
                break
            start = num_blocks * self.layout.block_bytes
            assert bytes(image) == bytes(right[start : start + len(image)])
            num_blocks += found.num_blocks
        return num_blocks


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def used_by(directory: Path) -> int:
    total = 0
    for top, _, names in os.walk(directory):
        for path in (Path(top), *(Path(top) / name for name in names)):
            with suppress(FileNotFoundError):
                total += path.lstat().st_blocks * 512
    return total


def payload_files(directory: Path) -> list[Path]:
    return [path for path in files_of(directory) if path.suffix == ".kv"]


# What it keeps


def test_a_conversation_comes_back_in_another_process(open_tier: OpenTier) -> None:
    writer = Writer(open_tier())
    for length in (9, 30, 31, 77):
        assert writer.write(list(range(length)))
    writer.tier.close()

    reader = Writer(open_tier())

    assert reader.restored(list(range(77))) == 19
    assert reader.restored(list(range(50))) == 12
    assert reader.restored([5, *range(50)]) == 0
    assert reader.tier.status().num_packs == 3  # a block that was there already is not written


def test_random_conversations_branch_and_come_back_like_a_dict(open_tier: OpenTier) -> None:
    rng = random.Random(3)
    writer, known = Writer(open_tier()), set()
    contexts: list[list[int]] = [[]]
    for step in range(150):
        context = rng.choice(contexts)
        context = [*context[: rng.randrange(len(context) + 1)], *rng.choices(range(3), k=9)]
        if rng.random() < 0.6:
            writer.write(context)
            known.update(tuple(context[:end]) for end in range(4, len(context) + 1, 4))
            contexts.append(context)
        expected = 0
        while tuple(context[: expected * 4 + 4]) in known and expected * 4 + 4 <= len(context):
            expected += 1
        assert writer.restored(context) == expected, step


def test_another_identity_or_geometry_finds_nothing(open_tier: OpenTier) -> None:
    Writer(open_tier()).write(list(range(20)))
    for layout in (
        Layout(bytes(16), LAYOUT.block_size, LAYOUT.block_bytes),
        Layout(LAYOUT.identity, 8, LAYOUT.block_bytes * 2),
        Layout(LAYOUT.identity, LAYOUT.block_size, 256),
    ):
        assert Writer(open_tier(layout=layout), layout).restored(list(range(20))) == 0


def test_a_key_that_collides_does_not_answer_for_other_ids(open_tier: OpenTier) -> None:
    tier = open_tier()
    Writer(tier).write([1, 2, 3, 4])
    keys = chain_keys(tier.root, encode_ids([1, 2, 3, 4]), LAYOUT.ids_bytes)

    assert tier.find(keys, encode_ids([9, 9, 9, 9])) == []


def test_two_tiers_on_one_directory_see_each_others_packs_at_once(open_tier: OpenTier) -> None:
    one, other = Writer(open_tier()), Writer(open_tier())
    one.write(list(range(20)))

    assert other.restored(list(range(20))) == 5
    other.write(list(range(40)))
    assert one.restored(list(range(40))) == 10


# What the world breaks


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": damage_flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "gone": lambda path: path.unlink(),
    "wrong magic": lambda path: path.write_bytes(b"XXXX" + path.read_bytes()[4:]),
    "another version": lambda path: path.write_bytes(
        path.read_bytes()[:4] + b"\x63" + path.read_bytes()[5:]
    ),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link": lambda path: (path.rename(f"{path}.2"), path.symlink_to(f"{path}.2")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}
LONG = Layout(LAYOUT.identity, 4, 1 << 16)  # payloads of their own files


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_a_miss_once_and_can_be_written_again(
    open_tier: OpenTier, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    writer = Writer(open_tier(layout=LONG), LONG)
    writer.write(list(range(40)))
    [payload] = payload_files(tmp_path / "kv")
    damage(payload)

    assert writer.restored(list(range(40))) == 0
    assert writer.tier.status().trouble
    assert writer.write(list(range(40)))
    assert writer.restored(list(range(40))) == 10


def test_a_flipped_bit_anywhere_is_noticed_or_harmless(open_tier: OpenTier, tmp_path: Path) -> None:
    """Wrong bytes would fail in `restored`."""
    rng = random.Random(1)
    small, ids = Layout(LAYOUT.identity, 4, 1 << 14), list(range(40))
    for _ in range(60):
        writer = Writer(open_tier(layout=small), small)
        writer.write(ids)
        writer.tier.close()
        path = rng.choice(files_of(tmp_path / "kv"))
        if not (data := bytearray(path.read_bytes())):
            continue
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)

        reader = Writer(open_tier(layout=small), small)
        reader.restored(ids)
        reader.write(ids)
        reader.restored(ids)


def test_a_table_that_is_no_database_is_begun_anew(open_tier: OpenTier, tmp_path: Path) -> None:
    writer = Writer(open_tier())
    writer.write(list(range(40)))
    writer.tier.close()
    [table] = (tmp_path / "kv").rglob("cache.db")
    for path in table.parent.glob("cache.db*"):
        path.write_bytes(b"not a database" * 1000)

    writer = Writer(open_tier())

    assert writer.restored(list(range(40))) == 0
    assert writer.write(list(range(40)))
    assert writer.restored(list(range(40))) == 10


def test_a_lost_table_leaves_files_that_gc_removes(open_tier: OpenTier, tmp_path: Path) -> None:
    writer = Writer(open_tier(layout=LONG), LONG)
    writer.write(list(range(40)))
    writer.tier.close()
    for path in (tmp_path / "kv").rglob("cache.db*"):
        path.unlink()

    writer = Writer(open_tier(layout=LONG), LONG)
    assert writer.restored(list(range(40))) == 0
    writer.tier.gc()
    assert payload_files(tmp_path / "kv") == []
    assert writer.write(list(range(40)))


def test_a_directory_that_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Cannot use the directory"):
        DiskTier(Path("/proc/kv"), LAYOUT, MIB)

    (tmp_path / "kv").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kv" / LAYOUT.identity.hex()).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        DiskTier(tmp_path / "kv", LAYOUT, MIB)


def test_a_busy_table_is_a_miss(open_tier: OpenTier, tmp_path: Path) -> None:
    writer = Writer(open_tier())
    writer.write(list(range(40)))
    [table] = (tmp_path / "kv").rglob("cache.db")
    with sqlite3.connect(table) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert not writer.write(list(range(80)))
        assert writer.tier.status().num_held_up == 1
        assert writer.tier.status().trouble == "", "it passes"
        other.rollback()
    other.close()

    assert writer.write(list(range(80)))


def test_a_full_disk_keeps_nothing_more_and_says_so(open_tier: OpenTier) -> None:
    writer = Writer(open_tier(min_free_bytes=1 << 60))

    assert not writer.write(list(range(40)))
    assert "nearly full" in writer.tier.status().trouble
    assert writer.tier.status().num_failed_writes == 1


# Bounds and privacy


def test_the_limit_holds_at_every_instant(open_tier: OpenTier, tmp_path: Path) -> None:
    limit = 8 * MIB
    writer = Writer(open_tier(limit, LONG), LONG)
    rng = random.Random(0)
    for number in range(160):  # several times the limit
        writer.write([number, *rng.choices(range(9), k=rng.randrange(3, 40))])
        assert used_by(tmp_path / "kv") <= limit

    status = writer.tier.status()
    assert status.bytes_written > 3 * limit
    assert status.num_evicted > 0
    assert status.num_failed_writes == 0


def test_the_limit_counts_what_other_models_left(open_tier: OpenTier, tmp_path: Path) -> None:
    limit = 8 * MIB
    for number in range(4):
        layout = Layout(bytes([number]) * 16, 4, 1 << 16)
        writer = Writer(open_tier(limit, layout), layout)
        for first in range(20):
            assert writer.write([first, *range(40)])
            assert used_by(tmp_path / "kv") <= limit


def test_beginnings_outlive_what_follows_them(open_tier: OpenTier) -> None:
    """A conversation's first pack is the oldest, and all the others hang on it.

    One that outgrows the store keeps as much of its beginning as fits; it once lost the pack that
    the next one was to continue.
    """
    writer = Writer(open_tier(4 * MIB, LONG), LONG)
    ids: list[int] = []
    kept = 0
    for turn in range(30):
        ids += [turn] * 8
        writer.write(ids)
        assert writer.restored(ids) >= kept
        kept = writer.restored(ids)

    assert 10 < kept < 60
    assert not writer.tier.status().num_evicted


def test_old_model_dirs_go(open_tier: OpenTier, tmp_path: Path) -> None:
    writer, other = Writer(open_tier()), Layout(b"o" * 16, 4, 512)
    writer.write(list(range(40)))
    writer.tier.close()

    old = tmp_path / "kv" / LAYOUT.identity.hex()
    for num_days, is_kept in ((0, True), (13, True), (15, False)):
        open_tier(layout=other).close()  # it was used just now
        if old.exists():
            set_last_used(old, time.time() - num_days * 86400.0)
        open_tier(layout=other).close()
        assert old.exists() == is_kept


def test_a_clock_that_jumps_deletes_nothing(open_tier: OpenTier, tmp_path: Path) -> None:
    """A start with the clock 14 years ahead deleted all KV, that of other models too."""
    ids, later = list(range(40)), [1, *range(40)]
    Writer(open_tier()).write(ids)
    other = Layout(b"o" * 16, 4, 512)
    Writer(open_tier(layout=other), other).write(ids)

    def ahead() -> float:
        return time.time() + 14 * 365 * 86400.0

    for _ in range(2):
        tier = open_tier(clock=ahead)
        assert Writer(tier).restored(ids) == 10
        Writer(tier).write(later)
        tier.close()
    assert (tmp_path / "kv" / other.identity.hex()).exists()

    tier = open_tier()  # the clock is right again
    assert Writer(tier).restored(ids) == Writer(tier).restored(later) == 10
    newest_s = tier._db.table.newest_use_s()
    assert newest_s <= time.time() + 60.0, "nothing stays dear for 14 years"


def test_a_pause_makes_nothing_older_than_a_week(open_tier: OpenTier) -> None:
    now_s = [1e9]
    writer = Writer(open_tier(clock=lambda: now_s[0]))
    writer.write([1, *range(40)])
    now_s[0] += 25 * 86400.0
    writer.write([2, *range(40)])
    writer.tier.close()

    now_s[0] += 4 * 86400.0  # of 29 days without a use
    assert open_tier(clock=lambda: now_s[0]).status().num_packs == 2
    now_s[0] += 40 * 86400.0  # now one has 32 days, for a pause is a week at most
    assert open_tier(clock=lambda: now_s[0]).status().num_packs == 1


def test_verify_reads_everything_and_drops_what_is_damaged(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    writer = Writer(open_tier(layout=LONG), LONG)
    for first in range(3):
        writer.write([first, *range(40)])
    damage_flip(payload_files(tmp_path / "kv")[0])

    assert writer.tier.verify() == (2, 1)
    assert writer.tier.verify() == (2, 0)


_OTHER_PROCESS = """
import sys, random
from pathlib import Path
from test_disk_tier import Writer, LONG
from kvchat.cache.disk.tier import DiskTier
writer = Writer(DiskTier(Path(sys.argv[1]), LONG, 8 << 20, min_free_bytes=0), LONG)
rng = random.Random(int(sys.argv[2]))
for _ in range(60):
    ids = [rng.randrange(6), *range(rng.randrange(8, 60))]
    writer.write(ids)
    writer.restored([rng.randrange(6), *range(60)])
"""


def test_processes_share_a_store_without_errors_or_wrong_bytes(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
    others = [
        subprocess.Popen(
            [sys.executable, "-c", _OTHER_PROCESS, str(tmp_path / "kv"), str(number)],
            env=environment,
        )
        for number in range(3)
    ]
    highest = 0
    while any(other.poll() is None for other in others):
        highest = max(highest, used_by(tmp_path / "kv"))

    assert [other.returncode for other in others] == [0, 0, 0]
    assert highest <= 8 * MIB
