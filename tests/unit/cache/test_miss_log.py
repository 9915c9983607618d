"""Why KV is not there: every reason, told also to the next process, and not after /forget."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from kvchat.cache.disk import model_dirs
from kvchat.cache.disk.miss_log import MissReasonLog
from kvchat.cache.disk.model_dirs import DATABASE
from kvchat.cache.disk.quota import least_bytes
from kvchat.cache.disk.table import PackTable
from kvchat.cache.disk.tier import DiskTier
from kvchat.cache.keys import encode_ids
from kvchat.cache.tier import DamagedRecord, Layout
from kvchat.core.types import MissReason
from support.pack_chains import LAYOUT, find, keys_of, open_tier, payload_files, restored, save

CONTEXT = list(range(1, 13))
OTHER = Layout(identity=b"model of others.", block_size=2, block_bytes=40_000)


def why(directory: Path, ids: list[int], layout: Layout = LAYOUT) -> MissReason:
    with closing(open_tier(directory, layout=layout)) as tier:
        num_found = sum(found.num_blocks for found in find(tier, ids))
        keys = keys_of(tier, ids)
        return tier.why(keys[num_found], encode_ids(ids), num_found)


def decline(tier: DiskTier, ids: list[int]) -> None:
    tier.note_declined(keys_of(tier, ids), encode_ids(ids))


def failing(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


def test_what_was_never_there(tmp_path: Path) -> None:
    assert why(tmp_path, CONTEXT) is MissReason.NEVER_WRITTEN


def test_what_another_model_has(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, layout=OTHER)
    assert save(tier, CONTEXT, OTHER)
    tier.close()

    assert why(tmp_path, CONTEXT) is MissReason.OTHER_MODEL
    assert why(tmp_path, [7, 7, 7, 7]) is MissReason.NEVER_WRITTEN


def test_what_a_draft_has_is_no_other_models(tmp_path: Path) -> None:
    """Where only the model's part of the store had been deleted, its own draft's was taken for
    another model's: "model changed", said to a user who had changed none.
    """
    tier, draft = open_tier(tmp_path), DiskTier(tmp_path, OTHER, 8 << 20, 0, is_draft=True)
    assert save(tier, CONTEXT)
    assert save(draft, CONTEXT, OTHER)
    assert save(draft, [5, 5, *CONTEXT], OTHER)
    draft.forget(keys_of(draft, [5, 5, *CONTEXT], OTHER)[2:])  # which writes the rest anew
    tier.close()
    draft.close()
    shutil.rmtree(tmp_path / LAYOUT.identity.hex())

    assert why(tmp_path, CONTEXT) is MissReason.NEVER_WRITTEN
    assert why(tmp_path, [5, 5, *CONTEXT]) is MissReason.NEVER_WRITTEN


def test_what_had_to_make_room(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 5 << 20)
    contexts = [[number] * 8 for number in range(20, 50)]
    for context in contexts:
        assert save(tier, context), tier.status()
    gone = [context for context in contexts if not find(tier, context)]
    tier.close()

    assert gone
    assert all(why(tmp_path, context) is MissReason.EVICTED for context in gone)


@pytest.mark.parametrize("content", [b"", b"no table at all" * 400], ids=["empty", "garbage"])
def test_what_another_model_has_cannot_be_looked_into(tmp_path: Path, content: bytes) -> None:
    """A table that a full disk, a kill or a process at its beginning left empty was taken for our
    own: looking into it deleted all that we had kept, pins included.
    """
    tier = open_tier(tmp_path)
    assert save(tier, CONTEXT)
    other = tmp_path / ("0b" * 16)
    model_dirs.make(other)
    (other / DATABASE).write_bytes(content)
    unknown = [90, 91, 92, 93]

    assert tier.why(keys_of(tier, unknown)[0], encode_ids(unknown), 0) is MissReason.NEVER_WRITTEN

    assert find(tier, CONTEXT)
    assert tier.status().trouble == ""
    tier.close()


def test_what_found_no_room(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, least_bytes(1000))
    assert not save(tier, CONTEXT)
    tier.close()

    assert why(tmp_path, CONTEXT) is MissReason.OVER_BUDGET


def test_what_is_not_offered_while_there_is_no_room(tmp_path: Path) -> None:
    """After a refusal a tier is left alone for a while: what came then was called never written."""
    tier = open_tier(tmp_path, least_bytes(1000))
    decline(tier, CONTEXT)
    assert why(tmp_path, CONTEXT) is MissReason.NEVER_WRITTEN, "nothing had been refused"
    assert not save(tier, [7, 7])
    for _ in range(3):
        decline(tier, CONTEXT)
    tier.close()

    assert why(tmp_path, CONTEXT) is MissReason.OVER_BUDGET
    assert why(tmp_path, CONTEXT[:2]) is MissReason.OVER_BUDGET
    [miss_log] = tmp_path.glob("*/fates")
    assert miss_log.read_bytes().count(keys_of(tier, CONTEXT)[0]) == 1, "once is enough"


def test_who_finds_no_room_either_deletes_no_others_for_it(tmp_path: Path) -> None:
    """A draft model's tier deleted the model's, with all it knew, for a pack that did not fit."""
    limit = least_bytes(6 * 40_000 - 20_000)
    tier = open_tier(tmp_path, limit)
    assert not save(tier, CONTEXT)
    tier.close()
    other = open_tier(tmp_path, limit, OTHER)
    assert not save(other, CONTEXT, OTHER)
    other.close()

    assert why(tmp_path, CONTEXT) is MissReason.OVER_BUDGET


def test_what_is_there_is_not_declined_but_what_follows_it(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, least_bytes(400_000))
    assert save(tier, CONTEXT[:4])
    assert not save(tier, [7] * 60)
    decline(tier, CONTEXT)
    decline(tier, CONTEXT[:4])

    assert find(tier, CONTEXT)
    assert tier.why(keys_of(tier, CONTEXT)[2], encode_ids(CONTEXT), 2) is MissReason.OVER_BUDGET
    tier.close()


def test_what_a_disk_refused_for_another_reason_says_nothing_of_others(tmp_path, monkeypatch):
    tier = open_tier(tmp_path)
    monkeypatch.setattr(PackTable, "keep", failing)
    assert not save(tier, [7, 7])
    decline(tier, CONTEXT)
    tier.close()

    assert why(tmp_path, CONTEXT) is MissReason.NEVER_WRITTEN


def test_what_was_damaged(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert save(tier, CONTEXT)
    [path] = payload_files(tmp_path)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DamagedRecord, match="checksum"):
        restored(tier, CONTEXT)
    tier.close()

    assert why(tmp_path, CONTEXT) is MissReason.CORRUPT


def test_what_was_wrong(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert save(tier, CONTEXT)
    tier.quarantine(keys_of(tier, CONTEXT))
    assert tier.status().num_quarantined == 6
    tier.close()

    assert why(tmp_path, CONTEXT) is MissReason.QUARANTINED


def test_what_is_forgotten_leaves_no_trace(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    keys = keys_of(tier, CONTEXT)
    assert save(tier, CONTEXT)
    tier.quarantine(keys)
    tier.forget(keys)
    tier.close()

    assert why(tmp_path, CONTEXT) is MissReason.NEVER_WRITTEN
    [miss_log] = tmp_path.glob("*/fates")
    assert not any(key in miss_log.read_bytes() for key in keys)


def test_the_file_stays_small_and_private_and_may_be_broken(tmp_path: Path) -> None:
    own = tmp_path / LAYOUT.identity.hex()
    model_dirs.make(own)
    log = MissReasonLog(own)
    before = os.umask(0)
    try:
        for number in range(5000):
            log.note([number.to_bytes(16)], MissReason.EVICTED)
    finally:
        os.umask(before)
    path = own / "fates"

    assert path.stat().st_size <= 4096 * 17
    assert path.stat().st_mode & 0o777 == 0o600
    assert log.of((4999).to_bytes(16)) is MissReason.EVICTED
    assert log.of((1).to_bytes(16)) is None
    path.write_bytes(b"\xff" * 1000)
    assert log.of((4999).to_bytes(16)) is None
    path.unlink()
    path.mkdir()
    log.note([bytes(16)], MissReason.CORRUPT)
    assert log.of(bytes(16)) is None
