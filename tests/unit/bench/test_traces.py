"""Replayed traces: each rule evicts as its plain twin, kvchat's as the product does."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from kvchat.bench.traces import synthetic
from kvchat.bench.traces.caches import Belady, Future, Lfu, Lru, RetentionRule, SimulatedCache
from kvchat.bench.traces.paths import PathTrace
from kvchat.bench.traces.records import TraceRequest, read_trace
from kvchat.bench.traces.simulation import Speed, TierPlan, replay, routed
from kvchat.cache.disk.eviction import KnownPack, eviction_order
from kvchat.cache.keys import encode_ids
from kvchat.cache.radix_tree import RadixTree
from kvchat.cli.bench_trace import TraceRun, run_trace, tier_plans
from kvchat.core.errors import UsageError

TOKENS = 256


def random_requests(seed: int, count: int = 120, longest: int = 6) -> Iterator[TraceRequest]:
    """Contexts that continue, leave and repeat each other. A block's number says its whole path."""
    rng = random.Random(seed)
    known: list[tuple[int, ...]] = [()]
    numbers: dict[tuple[int, ...], int] = {}
    time_s = 0.0
    for _ in range(count):
        time_s += rng.expovariate(1 / 900)
        path = rng.choice(known)[: rng.randrange(longest)]
        path += tuple(rng.randrange(4) for _ in range(rng.randrange(1, 3)))
        known.append(path[:longest])
        ids = [numbers.setdefault(path[: n + 1], len(numbers)) for n in range(len(path))]
        yield TraceRequest(time_s, len(ids) * TOKENS + 1, 10, ids, rng.random() < 0.2)


def random_trace(seed: int, **sizes: int) -> PathTrace:
    return PathTrace(TOKENS, random_requests(seed, **sizes))


def hits(trace: PathTrace, cache: SimulatedCache) -> int:
    """Return how many blocks of all requests were present; checks what must hold of the cache."""
    count = 0
    for request in range(len(trace)):
        path = trace.path(request)
        count += cache.find(path)
        cache.add(path, request)
        assert cache.num_used == sum(cache.num_present.values()) <= capacity_of(cache)
        for segment in cache.num_present:
            parent = trace.parent[segment]
            assert not parent or cache.num_present[parent] == trace.size[parent]
    return count


def capacity_of(cache: SimulatedCache) -> int:
    return cache._capacity


# The trace


def test_segments_are_runs_that_all_requests_have_whole_or_not_at_all() -> None:
    for seed in range(20):
        requests = list(random_requests(seed))
        trace = PathTrace(TOKENS, requests)
        for number, request in enumerate(requests):
            path = trace.path(number)
            assert sum(trace.size[segment] for segment in path) == len(request.blocks)
            starts = [trace.start[segment] for segment in path]
            assert all(
                b == a + trace.size[s] for (a, b), s in zip(pairwise(starts), path, strict=False)
            )
        assert trace.num_blocks == len({block for r in requests for block in r.blocks})


# The rules


def test_kvchats_rule_evicts_as_the_disks_own_order_says() -> None:
    """The simulated rule keeps heaps; the product sorts all packs anew. Both evict the same."""
    compared = []

    class Checked(RetentionRule):
        def evict(self, num_blocks: int, protected: frozenset[int]) -> None:
            packs = self.packs()
            end = max(
                (s for s in protected if s in self.num_present),
                key=lambda s: self._trace.start[s],
                default=0,
            )
            newcomer = (end, self.num_present[end] - 1) if end else (-1, -1)
            order = [names[key] for key in eviction_order(packs, str(newcomer).encode())]
            before = dict(self.num_present)
            super().evict(num_blocks, protected)
            gone = {(s, n) for s in before for n in range(self.num_present.get(s, 0), before[s])}
            assert gone == set(order[: max(0, num_blocks)])
            compared.append(len(gone))

        def packs(self) -> dict[bytes, KnownPack]:
            packs = {}
            names.clear()
            for segment, count in self.num_present.items():
                parent = self._trace.parent[segment]
                before = (parent, self._trace.size[parent] - 1) if parent else (-1, -1)
                for block in range(count):
                    name = str((segment, block)).encode()
                    names[name] = (segment, block)
                    is_last = block == self._trace.size[segment] - 1
                    followed = self._uses[segment].num_followed if is_last else 1
                    use = replace(self._uses[segment], num_followed=followed)
                    parent_key = str(before).encode()
                    packs[name] = KnownPack(parent_key, (name,), TOKENS, TOKENS, use)
                    before = (segment, block)
            return packs

    names: dict[bytes, tuple[int, int]] = {}
    for seed in range(12):
        trace = random_trace(seed)
        hits(trace, Checked(trace, 25))

    assert sum(compared) > 200


def test_recency_evicts_as_the_radix_tree_does() -> None:
    """The tree that holds the device's KV is the product's own recency."""
    for seed in range(12):
        requests = list(random_requests(seed))
        trace = PathTrace(TOKENS, requests)
        cache, tree, capacity = Lru(trace, 25), RadixTree(1), 25
        for number, request in enumerate(requests):
            path, encoded = trace.path(number), encode_ids(request.blocks)
            match = tree.match(encoded)
            assert cache.find(path) == len(match.blocks)
            tree.lock(match.node)
            missing = encoded[len(match.blocks) * 4 :]
            tree.evict(tree.num_blocks + len(missing) // 4 - capacity, lambda block: False)
            inserted = tree.insert(match.node, missing, [number] * (len(missing) // 4))
            tree.unlock(match.node) if inserted.node is not match.node else None
            while inserted.node.lock_count:
                tree.unlock(inserted.node)
            cache.add(path, number)
            assert cache.num_used == tree.num_blocks


def best_hits(paths: Sequence[tuple[int, ...]], capacity: int, parents: dict[int, int]) -> int:
    """Return the most hits of any rule, by trying all: the plain twin of Belady's."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for path in paths:
        after: dict[frozenset[int], int] = {}
        for state, count in states.items():
            found = next((n for n, block in enumerate(path) if block not in state), len(path))
            for kept in _closed(state | set(path), capacity, parents):
                after[kept] = max(after.get(kept, 0), count + found)
        states = after
    return max(states.values())


def _closed(
    blocks: frozenset[int], capacity: int, parents: dict[int, int]
) -> Iterator[frozenset[int]]:
    """Yield the sets of at most `capacity` blocks that have the parent of each block."""
    ordered = sorted(blocks)
    for bits in range(1 << len(ordered)):
        chosen = frozenset(b for n, b in enumerate(ordered) if bits >> n & 1)
        if len(chosen) <= capacity and all(parents[b] in chosen or parents[b] < 0 for b in chosen):
            yield chosen


def test_beladys_rule_has_the_most_hits_of_all_rules() -> None:
    for seed in range(10):
        requests = list(random_requests(seed, count=9, longest=3))
        parents: dict[int, int] = {}
        for request in requests:
            parents.update(zip(request.blocks, [-1, *request.blocks], strict=False))
        trace = PathTrace(TOKENS, requests)
        found = hits(trace, Belady(trace, 3, Future(trace)))

        assert found == best_hits([tuple(r.blocks) for r in requests], 3, parents), seed


@pytest.mark.parametrize("rule", [RetentionRule, Lru, Lfu])
def test_no_rule_has_more_hits_than_beladys(rule: type[SimulatedCache]) -> None:
    for seed in range(10):
        trace = random_trace(seed)
        assert hits(trace, rule(trace, 20)) <= hits(trace, Belady(trace, 20, Future(trace)))


def test_a_store_that_is_full_within_hours_goes_by_recency_too() -> None:
    """With a half-life of a day for all, finished chats filled it, and new ones found no room."""
    trace = PathTrace(TOKENS, synthetic.synthetic("chats", 3000))

    ruled, recent = hits(trace, RetentionRule(trace, 150)), hits(trace, Lru(trace, 150))

    assert ruled > 0.98 * recent


def test_what_is_read_once_does_not_push_out_what_people_use() -> None:
    def requests() -> Iterator[TraceRequest]:
        for day in range(6):
            for number in range(20):
                chat = [f"chat {number % 5} {n}" for n in range(8)]
                yield TraceRequest(day * 86400.0 + number * 60, 8 * TOKENS + 1, 0, chat)
            for number in range(200):
                scan = [f"scan {day} {number} {n}" for n in range(4)]
                time_s = day * 86400.0 + 7200 + number * 60
                yield TraceRequest(time_s, 4 * TOKENS + 1, 0, scan, is_one_shot=True)

    trace = PathTrace(TOKENS, requests())

    assert hits(trace, RetentionRule(trace, 60)) > 1.2 * hits(trace, Lru(trace, 60))


# Tiers and machines

SPEED = Speed(token_bytes=1000.0, tokens_per_s=100.0)


def test_a_prompt_takes_from_each_tier_what_the_faster_ones_lack() -> None:
    blocks = [*range(8)]
    trace = PathTrace(TOKENS, [TraceRequest(float(n), 8 * TOKENS, 0, blocks) for n in range(2)])
    tiers = [
        TierPlan("memory", 2 * TOKENS * 1000),
        TierPlan("disk", 6 * TOKENS * 1000, bytes_per_s=1e9, latency_s=0.001),
    ]

    result = replay(trace, tiers, SPEED, "kvchat", [0, 0])

    assert result.found_tokens == {"memory": 2 * TOKENS, "disk": 4 * TOKENS}
    cold_s, warm_s = result.first_token_s
    assert cold_s == pytest.approx(8 * TOKENS * (1 + 4 * TOKENS / 8192) / 100)
    computed_s = 2 * TOKENS * (1 + 7 * TOKENS / 8192) / 100
    assert warm_s == pytest.approx(computed_s + 0.001 + 4 * TOKENS * 1000 / 1e9, rel=0.01)


def test_a_shared_store_serves_what_another_machine_computed() -> None:
    requests = [
        TraceRequest(float(n), 4 * TOKENS + 1, 0, [*range(4)], machine=name)
        for n, name in enumerate("abab")
    ]
    trace = PathTrace(TOKENS, requests)
    machines, count = routed(trace, 1)
    own = TierPlan("disk", 1 << 30, 1e9)
    shared = replace(own, name="shared")

    alone = replay(trace, [own], SPEED, "LRU", machines)
    together = replay(trace, [own, shared], SPEED, "Belady", machines)

    assert count == 2
    assert alone.found_tokens == {"disk": 2 * 4 * TOKENS}
    assert together.found_tokens == {"disk": 2 * 4 * TOKENS, "shared": 4 * TOKENS}


def test_conversations_stay_on_a_machine_and_machines_share_the_work() -> None:
    trace = PathTrace(TOKENS, synthetic.synthetic("chats", 2000))

    machines, count = routed(trace, 8)

    loads = [0] * count
    moves = 0
    last: dict[int, int] = {}
    for request, machine in enumerate(machines):
        loads[machine] += trace.prompt_tokens[request]
        path = trace.path(request)
        if len(path) > 2:
            moves += last.get(path[-2], machine) != machine
        last[path[-1]] = machine
    assert max(loads) < 2 * sum(loads) / count
    assert moves < len(trace) / 10


# Files and the command


def test_kvchats_own_form_and_mooncakes_are_read(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"kvchat_trace": 1, "block_tokens": 64}\n\n'
        '{"time_s": 2.5, "prompt_tokens": 100, "answer_tokens": 30, "blocks": ["a", "b"], '
        '"one_shot": true, "machine": "m"}\n{"blocks": ["a"]}\n'
    )
    theirs = tmp_path / "theirs.jsonl"
    theirs.write_text(
        '{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}\n'
    )

    block_tokens, requests = read_trace(own)
    assert block_tokens == 64
    assert list(requests) == [
        TraceRequest(2.5, 100, 30, ["a", "b"], True, "m"),
        TraceRequest(0.0, 64, 0, ["a"]),
    ]
    block_tokens, requests = read_trace(theirs)
    assert (block_tokens, list(requests)) == (512, [TraceRequest(1.5, 700, 9, [4, 5])])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty."),
        ("[1]\n", "Line 1 of .* is not a JSON object."),
        ('{"a": 1}\n', "Line 1 of .* has neither `blocks` nor `hash_ids`: it is no trace."),
        ('{"kvchat_trace": 2}\n', "a trace of a form that this version does not know."),
        ('{"blocks": [1]}\n{"blocks": 5}\n', "Line 2 of .* is no request: its blocks are not"),
        ('{"hash_ids": [1]}\n', "Line 1 of .* is no request: 'input_length'."),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_its_line(tmp_path, text, sentence):
    path = tmp_path / "t.jsonl"
    path.write_text(text)

    with pytest.raises(UsageError, match=sentence):
        list(read_trace(path)[1])


def test_the_command_prints_a_row_for_each_rule_and_size(capsys):
    run = TraceRun("mixed", ("memory:64M", "disk:1G,4G:1G:2ms:0.5"), SPEED, num_requests=300)

    run_trace(run)

    page = capsys.readouterr().out
    assert "memory 64 MiB, disk 4 GiB at 1 GiB/s after 2 ms; 2.00 a month" in page
    assert [line.split()[0] for line in page.splitlines() if line.startswith("  ")].count(
        "Belady"
    ) == 2
    document = json.loads(page.splitlines()[-1])
    assert [row["rule"] for row in document["results"]] == [*caches_names()] * 2
    assert document["results"][0]["prompt_tokens"] > 100_000


def caches_names() -> tuple[str, ...]:
    return ("kvchat", "LRU", "LFU", "Belady")


@pytest.mark.parametrize(
    ("tier", "sentence"),
    [
        ("disk", "--tier is 'disk', but must be NAME:SIZE"),
        ("disk:5", "--tier is 5 bytes."),
        ("disk:1G:1G:x", "a tier's latency is 'x', but must be a number of 0 or more."),
        ("memory:1G", "Two tiers have one name."),
    ],
)
def test_a_bad_tier_is_refused(tier: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        list(tier_plans(("memory:1G", tier)))
