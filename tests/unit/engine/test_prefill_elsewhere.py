"""A machine that prefills for a chat: what it is sent, what comes of it, and what it may cost.

The box is an engine of its own on the same model; KV comes through a store, a dict.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvchat.cache.breaker import Breaker
from kvchat.cache.keys import root_key
from kvchat.cache.shared.elsewhere import ElsewhereTier
from kvchat.cache.shared.prefill_box import Offer
from kvchat.cache.shared.store import StoreTrouble
from kvchat.cache.shared.tier import SharedTier
from kvchat.cache.shared.tombstones import Tombstones
from kvchat.cache.tier import Layout, Tier, TierOpener
from kvchat.core.types import NO_MEMORY
from support.chains import compute_at
from support.restarts import Process, Processes, spec
from support.shared_machines import KEY, LAYOUT, Machines

ROOT = root_key(LAYOUT.identity)
PROMPT = tuple(i % 31 + 1 for i in range(90))
FORM = {"dtype": "bfloat16", "block size": "4"}
QUICK = Offer(ROOT, FORM, tokens_per_s=100.0)


class FakeBox:
    """Prefills on an engine of its own; raises `trouble`, or `waits` until it is interrupted."""

    def __init__(self, machines: Machines, offer: Offer = QUICK) -> None:
        self.prompts: list[list[int]] = []
        self.trouble = ""
        self.waits = False
        self.is_interrupted = threading.Event()
        self.told = offer
        self.now_s, self.takes_s = 0.0, 0.0
        self._process = machines.start()

    def offer(self) -> Offer:
        self._fail()
        return self.told

    def prefill(self, encoded: bytes) -> int:
        ids = memoryview(encoded).cast("i").tolist()
        self.prompts.append(ids)
        self._fail()
        self.now_s += self.takes_s
        if self.waits:
            assert self.is_interrupted.wait(30)
            raise StoreTrouble("it cannot be reached")
        self._process.answer(spec(tuple(ids), max_tokens=1))
        counts: list[int] = []
        self._process.harness.engine.share(ids, counts.append)
        assert self._process.chain.flush(10)
        return counts[0]

    def interrupt(self) -> None:
        self.is_interrupted.set()

    def _fail(self) -> None:
        if self.trouble:
            raise StoreTrouble(self.trouble)


class Chats:
    """Starts chats that have no disk, and a box; `asks_all` is --share all."""

    def __init__(self, asks_all: bool, offer: Offer) -> None:
        self.machines = Machines()
        self.box = FakeBox(self.machines, offer)
        self.now_s = 0.0
        opener = TierOpener(
            "elsewhere", self._open, is_only_read=True, takes_all=asks_all, computes=True
        )
        self._processes = Processes(None, [opener])
        self._started: list[Process] = []

    def _open(self, layout: Callable[[], Layout]) -> ElsewhereTier:
        breaker = Breaker(lambda: self.now_s)
        timer = lambda: self.box.now_s  # noqa: E731
        return ElsewhereTier(self.box, self._records_of, ROOT, FORM, breaker, timer)

    def _records_of(self, root: bytes) -> Tier | None:
        if root != ROOT:
            return None
        return SharedTier(self.machines.store, KEY, LAYOUT, 1000, Tombstones(NO_MEMORY))

    def start(self) -> Process:
        process = self._processes.start()
        self._started.append(process)
        assert process.chain.flush(10)
        compute_at(process.chain, 0.1)  # so slow that it waits for the box
        return process

    def end(self) -> None:
        for process in self._started:
            process.end()


NewChats = Callable[..., Chats]


@pytest.fixture
def new_chats() -> Iterator[NewChats]:
    made: list[Chats] = []

    def new(asks_all: bool = True, offer: Offer = QUICK) -> Chats:
        made.append(Chats(asks_all, offer))
        return made[-1]

    yield new
    for chats in made:
        chats.end()


def elsewhere(process: Process) -> tuple[float, str]:
    """Return the bytes that came from the box, and what is told of it."""
    [status] = [each for each in process.chain.status() if each.name == "elsewhere"]
    return status.bytes_read, status.trouble


def test_a_slow_chat_has_the_box_read_its_prompt(new_chats: NewChats) -> None:
    chats = new_chats()
    chat = chats.start()

    ending = chat.answer_rightly(spec(PROMPT))

    assert ending.usage.cached.places["elsewhere"] == 88
    assert chats.box.prompts == [list(PROMPT[:-1])]
    assert elsewhere(chat) == (88 // 4 * LAYOUT.block_bytes, "")


def test_without_share_all_only_the_system_prompt_is_sent(new_chats: NewChats) -> None:
    chats = new_chats(asks_all=False)
    chat = chats.start()
    chat.answer(spec(tuple(reversed(PROMPT))))
    assert chats.box.prompts == []

    asked = replace(spec(PROMPT), num_shared=41)
    ending = chat.answer_rightly(asked)

    assert chats.box.prompts == [list(PROMPT[:41])]
    assert ending.usage.cached.places["elsewhere"] == 40


def test_what_is_only_read_ahead_is_not_sent(new_chats: NewChats) -> None:
    chats = new_chats()
    chat = chats.start()
    chat.harness.engine.prefetch(PROMPT)
    chat.harness.engine.read_ahead(PROMPT)
    chat.harness.run()

    assert chats.box.prompts == []


def test_the_question_after_a_prefetch_that_found_nothing_is_sent(new_chats: NewChats) -> None:
    chats = new_chats()
    chat = chats.start()
    chat.harness.engine.prefetch(PROMPT[:60])

    ending = chat.answer_rightly(spec(PROMPT))

    assert ending.usage.cached.places["elsewhere"] == 88


@pytest.mark.parametrize(
    "offer", [replace(QUICK, tokens_per_s=0.05), replace(QUICK, tokens_per_s=0.11)]
)
def test_a_box_that_is_hardly_quicker_is_not_asked(new_chats: NewChats, offer: Offer) -> None:
    chats = new_chats(offer=offer)
    chat = chats.start()
    chat.answer(spec(PROMPT))

    assert chats.box.prompts == []


def test_a_box_that_fails_is_told_once_and_rests(new_chats: NewChats) -> None:
    chats = new_chats()
    chat = chats.start()
    chats.box.trouble = "it cannot be reached"

    for question in (PROMPT, tuple(reversed(PROMPT))):
        ending = chat.answer_rightly(spec(question))
        assert "elsewhere" not in ending.usage.cached.places

    assert len(chats.box.prompts) == 1
    assert elsewhere(chat) == (0, "prefill elsewhere failed: it cannot be reached.")
    chats.box.trouble, chats.now_s = "", 2.0
    _, ending = chat.answer(spec(PROMPT[1:]))
    assert ending.usage.cached.places["elsewhere"]
    assert elsewhere(chat)[1] == ""


def test_a_box_that_was_not_there_at_first_is_asked_later(new_chats: NewChats) -> None:
    chats = new_chats()
    chats.box.trouble = "it cannot be reached"
    chat = chats.start()
    assert "cannot be reached" in elsewhere(chat)[1]

    chats.box.trouble, chats.now_s = "", 2.0
    _, ending = chat.answer(spec(PROMPT))

    assert ending.usage.cached.places["elsewhere"] >= 80  # the first were computed here


@pytest.mark.parametrize(
    ("takes_s", "told"),
    [(1.0, ""), (100.0, "prefill elsewhere failed: it is slower than this machine.")],
)
def test_a_box_that_is_overtaken_is_stopped(new_chats: NewChats, takes_s: float, told: str) -> None:
    """That is a failure of the box only if it took longer than it says."""
    chats = new_chats()
    chats.box.waits, chats.box.takes_s = True, takes_s
    chat = chats.start()
    compute_at(chat.chain, 80.0)  # it computes meanwhile

    chat.answer_rightly(spec(PROMPT))

    assert chats.box.is_interrupted.wait(10)
    assert chat.chain.flush(10)
    assert elsewhere(chat)[1] == told


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({**FORM, "dtype": "float32"}, "its dtype is float32, and here it is bfloat16"),
        (FORM, "its model's files, its version of kvchat or its kind of processor differ"),
    ],
)
def test_a_box_of_other_kv_is_refused_with_the_reason(new_chats, form, told):
    chats = new_chats(offer=Offer(bytes(16), form, 100.0))
    chat = chats.start()

    chat.answer_rightly(spec(PROMPT))

    assert chats.box.prompts == []
    assert elsewhere(chat)[1] == f"prefill elsewhere failed: {told}."


def test_a_box_that_writes_to_another_store_is_found_out(new_chats: NewChats) -> None:
    chats = new_chats()
    chat = chats.start()
    chats.box._process = Machines().start()

    chat.answer_rightly(spec(PROMPT))

    assert "it writes to another shared cache" in elsewhere(chat)[1]
