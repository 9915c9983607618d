"""The limit of a store on disk holds at every moment, for all writers and operations.

Several processes together write more than the limit, under two identities, with pins and gc, while
another process measures the disk again and again, as `du` does. The writers stand still while it
looks: a search that takes a while counts a file that is evicted behind it and the file that took
its place ahead of it, which were never there together.
"""

import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from kvchat.cache.keys import encode_ids
from support.pack_chains import LAYOUT, keys_of, open_tier, save, used_bytes
from support.soak_sizes import short_and_long

LIMIT = 12 << 20
IDENTITIES = (LAYOUT.identity, b"another model...")


def _write(directory: Path, seed: int, share: int, written: "Synchronized[int]") -> None:
    rng = random.Random(seed)
    layout = replace(LAYOUT, identity=IDENTITIES[seed % len(IDENTITIES)])
    tier = open_tier(directory, LIMIT, layout)
    ids: list[int] = []
    while tier.status().bytes_written < share:
        ids = [] if rng.random() < 0.3 or len(ids) > 200 else ids
        ids += [rng.randint(0, 9) for _ in range(2 * rng.choice([1, 5, 20]))]
        save(tier, ids, layout)
        if rng.random() < 0.02:
            tier.pin(keys_of(tier, ids, layout), encode_ids(ids), f"{rng.randint(0, 1)}")
        if rng.random() < 0.02:
            tier.gc()
    status = tier.status()
    assert status.num_damaged == 0, status.trouble
    with written.get_lock():
        written.value += status.bytes_written
    tier.close()


def _bytes_of_one_instant(directory: Path, writers: list[ForkProcess]) -> int:
    """Return what the directory takes while no writer that is left runs."""
    stopped = []
    for writer in writers:
        if writer.is_alive() and writer.pid is not None:
            os.kill(writer.pid, signal.SIGSTOP)
            stopped.append(writer.pid)
    for pid in stopped:
        while _state_of(pid) not in "TZ":
            time.sleep(0)
    num_bytes = used_bytes(directory)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    return num_bytes


def _state_of(pid: int) -> str:
    """Return the state that Linux gives for a process: T is stopped, Z has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@short_and_long((2, 2), (4, 30))
def test_no_instant_sees_more_on_disk_than_the_limit(tmp_path: Path, size: tuple[int, int]) -> None:
    num_processes, times = size
    context = multiprocessing.get_context("fork")
    written = context.Value("q", 0)
    share = times * LIMIT // num_processes
    processes = [
        context.Process(target=_write, args=(tmp_path, seed, share, written))
        for seed in range(num_processes)
    ]
    for process in processes:
        process.start()
    most = num_looks = 0
    while any(process.is_alive() for process in processes):
        most, num_looks = max(most, _bytes_of_one_instant(tmp_path, processes)), num_looks + 1

    assert [process.exitcode for process in processes] == [0] * num_processes
    assert most <= LIMIT
    assert most > LIMIT // 2, "it was never near the limit"
    assert written.value >= share * num_processes
    print(f"\n{written.value >> 20} MiB written, {most / LIMIT:.1%} at most, {num_looks} looks")  # noqa: T201
