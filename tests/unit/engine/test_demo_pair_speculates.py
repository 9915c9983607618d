"""The shipped pair: the same answers with drafts and without, restored or not, in float32."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from kvchat.chat.chat_model import read_chat_model
from kvchat.chat.template import NewTurn
from kvchat.core.config import CacheConfig
from kvchat.core.events import RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.text import Size
from kvchat.core.types import SamplingParams
from kvchat.engine.assembly import AssembledEngine
from kvchat.engine.draft_model import ModelDrafter
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Mode
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT, ModelSource, find_model
from kvchat.model.checkpoint.text_files import same_vocabulary
from support.assembled import assemble_demo_pair
from support.checkpoints import save_checkpoint, tiny_model
from support.fixed_drafts import FixedDraftPolicy
from support.soak_sizes import short_and_long

QUESTIONS = ("What is a KV cache?", "List the days of the week.", "Tell me a story.", "thanks")
NOW = datetime(2026, 1, 2)
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Chat:
    """A conversation with one engine; `context` grows by every turn."""

    assembled: AssembledEngine
    mode: Mode

    def __post_init__(self) -> None:
        self.model = read_chat_model(find_model(DEMO))
        self.context: list[int] = []
        self.drafts: list[tuple[int, int]] = []

    def ask(self, text: str, sampling: SamplingParams = GREEDY, count: int = 60) -> list[int]:
        form = self.model.format
        if self.context:
            self.context += form.following(NewTurn(text, NOW), self.context[-1])
        else:
            self.context += form.opening(NewTurn(text, NOW))
        engine = self.assembled.engine
        engine.speculation.switch(self.mode)
        stops = self.model.stop_token_ids
        engine.submit(RequestSpec(tuple(self.context), sampling, count, stops))
        self._await_draft_kv()
        ids: list[int] = []
        while engine.has_work:
            for event in engine.step():
                assert not isinstance(event, RequestFailed), event.error
                if isinstance(event, TokensGenerated):
                    ids += event.token_ids
                if isinstance(event, SampleFinished):
                    usage = event.usage
                    self.drafts.append((usage.drafted_tokens, usage.accepted_tokens))
        self.context += ids
        return ids

    def _await_draft_kv(self) -> None:
        """Have the draft's KV come up before the answer begins, however slow the disk is."""
        engine = self.assembled.engine
        requests = engine._scheduler.requests()
        for drafter in engine.speculation._drafters:
            if isinstance(drafter, ModelDrafter):
                drafter.update(requests, 0.0)
                while any(
                    arrival and not arrival.is_over for arrival in drafter._arrivals.values()
                ):
                    drafter.update(requests, 0.0)


@pytest.fixture(scope="module")
def pair() -> Iterator[AssembledEngine]:
    assembled = assemble_demo_pair()
    yield assembled
    assembled.engine.close()


@short_and_long(1, 60)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_mode_gives_the_same_answers(size, temperature, pair):
    for seed in range(size):
        sampling = SamplingParams(temperature=temperature, top_p=0.9, seed=seed)
        texts = []
        for mode in (Mode.OFF, Mode.AUTO, Mode.NGRAM, Mode.DRAFT):
            chat = Chat(pair, mode)
            texts.append([chat.ask(question, sampling) for question in QUESTIONS])
            if mode is Mode.OFF:
                assert chat.drafts == [(0, 0)] * len(QUESTIONS)
        assert all(text == texts[0] for text in texts)


def test_a_restored_conversation_is_drafted_for_as_one_that_never_left(tmp_path: Path) -> None:
    def share(chat: Chat) -> float:
        """Return the accepted share of the last answers' drafts."""
        return sum(taken for _, taken in chat.drafts) / sum(drafted for drafted, _ in chat.drafts)

    cache = CacheConfig(device_bytes=Size(num_bytes=64 << 20), directory=tmp_path)
    stayed = Chat(assemble_demo_pair(cache), Mode.DRAFT)
    stayed.assembled.engine.speculation._policy = FixedDraftPolicy(4)
    stayed.ask(QUESTIONS[0])
    before = list(stayed.context)
    stayed.drafts.clear()
    answers = [stayed.ask(question) for question in QUESTIONS[1:]]
    stayed.assembled.engine.close()

    back = Chat(assemble_demo_pair(cache), Mode.DRAFT)
    back.assembled.engine.speculation._policy = FixedDraftPolicy(4)
    back.context = before
    assert [back.ask(question) for question in QUESTIONS[1:]] == answers
    back.assembled.engine.close()

    # No count of drafts: near ties fall otherwise where KV was computed in other portions.
    assert share(back) == pytest.approx(share(stayed), abs=0.15)
    identities = [path for path in tmp_path.iterdir() if len(path.name) == 32]
    assert len(identities) == 2, "the target's KV and the draft's lie apart"


def test_another_vocabulary_is_a_sentence_and_no_draft(tmp_path: Path) -> None:
    stranger = ModelSource("stranger", save_checkpoint(tmp_path, tiny_model("llama")))
    assembled = assemble_demo_pair(draft=stranger)

    [note] = [note for note in assembled.ready.notes if "draft" in note]
    assert note.startswith("Answers come without the draft model: ")
    assert assembled.ready.draft is None
    assert Chat(assembled, Mode.AUTO).ask(QUESTIONS[0])
    assembled.engine.close()


def test_a_draft_there_is_no_memory_for_is_a_sentence_and_no_draft(pair: AssembledEngine) -> None:
    block_bytes = pair.engine.cache.kv_pool.geometry.block_bytes
    size = Size(num_bytes=2 * block_bytes)
    assembled = assemble_demo_pair(CacheConfig(device_bytes=size, kv_dtype="float32"))

    [note] = [note for note in assembled.ready.notes if "draft" in note]
    assert "--device-cache" in note
    assert assembled.engine.status().num_blocks == 1
    assembled.engine.close()


def test_a_vocabulary_is_compared_id_by_id(tmp_path: Path) -> None:
    target = find_model(DEMO)
    assert same_vocabulary(target, find_model(DEMO_DRAFT))

    text = (target.directory / "tokenizer.json").read_text()
    renamed = text.replace('"ing":', '"gni":', 1)
    assert renamed != text
    (tmp_path / "tokenizer.json").write_text(renamed)
    assert not same_vocabulary(target, ModelSource("renamed", tmp_path))
    (tmp_path / "tokenizer.json").write_text(text.replace("\n", "\n ", 1) + "\n")
    assert same_vocabulary(target, ModelSource("spaced", tmp_path))
