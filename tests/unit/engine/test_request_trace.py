"""The trace of requests: what is in it, what is not, and that `kvchat bench trace` reads it."""

import json
from pathlib import Path

from kvchat.bench.traces.records import read_trace
from kvchat.core.types import CachedTokens, Fact, Memory, Timing, Usage
from kvchat.engine.request_trace import BLOCK_TOKENS, RequestTrace

TIMING = Timing(ttft_s=0.25, total_s=2.0)
USAGE = Usage(prompt_tokens=600, cached=CachedTokens(device=256, disk=256), completion_tokens=40)


class OneMemory(Memory):
    """A memory of one process."""

    def __init__(self) -> None:
        self.facts: dict[tuple[str, str], Fact] = {}

    def get(self, kind: str, key: str) -> Fact:
        return self.facts.get((kind, key))

    def update(self, kind: str, key: str, change: object) -> None:
        assert callable(change)
        self.facts[kind, key] = change(self.facts.get((kind, key)))


def noted(path: Path, memory: Memory, *contexts: list[int]) -> list[dict[str, object]]:
    trace = RequestTrace(path, b"model", memory, clock=lambda: 102.0)
    for ids in contexts:
        trace.note(ids, USAGE, TIMING, is_one_shot=False)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_hashes_counts_and_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    head, first = noted(path, OneMemory(), [*range(640)])

    assert head == {"kvchat_trace": 1, "block_tokens": BLOCK_TOKENS}
    hashes = first.pop("blocks")
    assert isinstance(hashes, list)
    assert [len(text) for text in hashes] == [16, 16]
    assert first == {
        "time_s": 100.0,
        "prompt_tokens": 600,
        "answer_tokens": 40,
        "found": {**CachedTokens(device=256, disk=256).as_dict()},
        "first_token_s": 0.25,
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_equal_beginnings_have_equal_hashes_on_one_machine_only(tmp_path: Path) -> None:
    """The key is not in the file: who gets the file cannot tell whether a known text was read."""
    memory = OneMemory()
    ids = [*range(600)]
    noted(tmp_path / "a", memory, ids)
    noted(tmp_path / "a", memory, [*ids[:300], *range(7000, 7300)])
    noted(tmp_path / "b", OneMemory(), ids)

    requests = [request.blocks for request in read_trace(tmp_path / "a")[1]]
    [elsewhere] = [request.blocks for request in read_trace(tmp_path / "b")[1]]

    assert requests[0][0] == requests[1][0]
    assert requests[0][1] != requests[1][1]
    assert not set(requests[0]) & set(elsewhere)


def test_a_file_that_cannot_be_written_ends_no_answer(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    trace = RequestTrace(link, b"model", OneMemory())

    trace.note([*range(300)], USAGE, TIMING, is_one_shot=False)
    trace.note([*range(300)], USAGE, TIMING, is_one_shot=False)

    assert not (tmp_path / "elsewhere").exists()
