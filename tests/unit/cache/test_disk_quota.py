"""How full a disk may get: what is left alone is left alone on the disk that holds the store."""

from collections import namedtuple
from pathlib import Path

import pytest

from kvchat.cache.disk import quota
from kvchat.cache.disk.quota import leaves_free

GIB = 1 << 30
Disk = namedtuple("Disk", "total used free")


@pytest.mark.parametrize(
    ("disk", "num_bytes", "is_allowed"),
    [
        (Disk(100 * GIB, 97 * GIB, 3 * GIB), 2 * GIB, True),
        (Disk(100 * GIB, 97 * GIB, 3 * GIB), 2 * GIB + 1, False),
        (Disk(2 * GIB, GIB, GIB), GIB - 2 * GIB // 20, True),
        (Disk(2 * GIB, GIB, GIB), GIB - 2 * GIB // 20 + 1, False),
        (Disk(100 * GIB, 100 * GIB, 0), 0, False),
    ],
    ids=["a GiB stays", "and not less", "of a small disk a part", "no less", "none is free"],
)
def test_a_gigabyte_is_left_alone_or_a_part_of_a_small_disk(
    monkeypatch: pytest.MonkeyPatch, disk: Disk, num_bytes: int, is_allowed: bool
) -> None:
    looked_at = []

    def usage(path: Path) -> Disk:
        looked_at.append(path)
        return disk

    monkeypatch.setattr(quota.shutil, "disk_usage", usage)

    assert leaves_free(Path("/somewhere/kv"), num_bytes, None) is is_allowed
    assert leaves_free(Path("/somewhere/kv"), num_bytes, 0) is (num_bytes <= disk.free)
    assert set(looked_at) == {Path("/somewhere/kv")}
