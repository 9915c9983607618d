"""N-gram lookup against its plain twin, which scans everything at every token."""

import random
from array import array
from collections.abc import Sequence

import pytest

from kvchat.core.types import SamplingParams
from kvchat.engine.drafters import DraftOrder
from kvchat.engine.ngram import NgramDrafter, NgramIndex, Text
from kvchat.engine.request import Clock, Request, RequestSpec


def scanned_len(texts: Sequence[Sequence[int]], asked: Sequence[int], most: int) -> int:
    """Return the longest run at the end of `asked` that stands before a token anywhere."""
    best = 0
    for ids in texts:
        for end in range(1, len(ids)):
            length = 0
            while (
                length < min(end, len(asked), most) and ids[end - 1 - length] == asked[-1 - length]
            ):
                length += 1
            best = max(best, length)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_match_is_found(seed: int) -> None:
    rng = random.Random(seed)
    index = NgramIndex(shortest=2, longest=6)
    texts = [Text() for _ in range(3)]
    for _ in range(60):  # fewer places than candidates are looked at
        text = rng.choice(texts)
        index.extend(text, [rng.randrange(3) for _ in range(rng.randrange(1, 3))])
        match = index.longest_match(text)
        expected = scanned_len([t.ids for t in texts], text.ids, most=6)
        if expected < 2:
            assert match is None
            continue
        if match is not None and index.num_tokens < 40:
            assert match.length == expected
        assert match is not None
        start = match.start - match.length
        assert match.text.ids[start : match.start] == text.ids[len(text.ids) - match.length :]
        assert match.start < len(match.text.ids)


@pytest.mark.parametrize(
    ("ids", "continuation"),
    [([1, 2, 7, 1, 2, 8, 1, 2], [8]), ([5, 6, 7, 5, 6, 7, 5], [6, 7, 5, 6, 7, 5, 6])],
    ids=["of equal matches the newest is taken", "a repetition that runs is copied on"],
)
def test_a_match_is_continued(ids: list[int], continuation: list[int]) -> None:
    index, text = NgramIndex(2, 8), Text()
    index.extend(text, ids)

    match = index.longest_match(text)

    assert match is not None
    assert match.continuation(len(continuation)) == continuation


def request(ids: Sequence[int]) -> Request:
    spec = RequestSpec(tuple(ids), SamplingParams(temperature=0.0))
    return Request.from_spec(1, spec, 0.0)


def draft(drafter: NgramDrafter, ids: Sequence[int], most: int = 4) -> list[int]:
    asking = request(ids)
    offer = drafter.offer(asking, most)
    return [] if offer is None else list(drafter.propose([DraftOrder(asking, offer.most)])[0])


FILE = list(range(100, 180))


def test_an_attached_file_is_quoted() -> None:
    assert draft(NgramDrafter(), [1, 2, *FILE, 3, 4, 110, 111, 112]) == [113, 114, 115, 116]
    assert draft(NgramDrafter(), [1, 2, *FILE, 3, 4, 5]) == []


def test_another_branch_is_remembered_after_it_has_left() -> None:
    drafter = NgramDrafter()
    first = request([1, 2, *FILE, 3])
    drafter.offer(first, 4)
    first.ids.extend(array("i", [50, 51, 52, 53, 54]))
    drafter.update([], 0.0)

    assert draft(drafter, [1, 2, *FILE, 4, 51, 52, 53]) == [54]


def test_a_beginning_that_many_share_is_entered_once() -> None:
    drafter = NgramDrafter()
    for last in range(20):
        draft(drafter, [1, 2, *FILE, last, last])

    assert drafter._index.num_tokens < len(FILE) + 20 * 64


def test_what_it_remembers_is_bounded() -> None:
    drafter, rng = NgramDrafter(max_tokens=500), random.Random(1)
    for _ in range(30):
        ids = [rng.randrange(1000) for _ in range(90)]
        assert draft(drafter, [*ids, *ids[:3]]) == ids[3:7]
        drafter.update([], 0.0)

    assert drafter._index.num_tokens <= 500 + 93


@pytest.mark.parametrize("num_running", [1, 3])
def test_contexts_longer_than_the_index_are_not_entered_again_at_every_step(
    num_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole index was forgotten and built again twice a step, above 262,144 tokens."""
    drafter, rng = NgramDrafter(max_tokens=2000), random.Random(1)
    running = [request([rng.randrange(1000) for _ in range(3000)]) for _ in range(num_running)]
    entered, extend = [0], NgramIndex.extend

    def counted(index: NgramIndex, text: Text, ids: Sequence[int]) -> None:
        entered[0] += len(ids)
        extend(index, text, ids)

    monkeypatch.setattr(NgramIndex, "extend", counted)
    for _ in range(100):
        for each in running:
            each.ids.append(rng.randrange(1000))
            drafter.offer(each, 4)
            drafter.propose([DraftOrder(each, 4)])

    assert entered[0] < 4 * 2000 * num_running
    for each in running:  # the end of a context is still looked up
        each.ids.extend(each.ids[-500:-490])
        assert drafter.offer(each, 4) is not None
        assert list(drafter.propose([DraftOrder(each, 4)])[0]) == list(each.ids[-500:-496])


def test_branches_of_a_conversation_that_was_opened_are_known() -> None:
    drafter = NgramDrafter()
    drafter.learn([[1, 2, *FILE, 7, 8, 9, 10], [1, 2, *FILE, 3, 4, 5, 6]])

    assert draft(drafter, [1, 2, *FILE, 11, 7, 8, 9]) == [10]
    assert draft(drafter, [1, 2, *FILE, 11, 3, 4, 5]) == [6]
    assert drafter._index.num_tokens < 3 * len(FILE), "four contexts share most of it"


def test_siblings_do_not_mix() -> None:
    drafter = NgramDrafter()
    left, right = request([1, 2, 3]), request([1, 2, 3])
    for step in range(40):
        for sibling, first in ((left, 200), (right, 300)):
            sibling.ids.append(first + step % 5)
            offer = drafter.offer(sibling, 2)
            if offer is not None:
                [ids] = drafter.propose([DraftOrder(sibling, 2)])
                assert all(token // 100 == first // 100 for token in ids)
    assert isinstance(left.clock, Clock)


def test_what_is_forgotten_is_not_drafted() -> None:
    drafter = NgramDrafter()
    draft(drafter, [*FILE, 1])
    drafter.forget()

    assert draft(drafter, [9, 8, 110, 111, 112]) == []
