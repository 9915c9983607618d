"""KV in few bits beside recurrent state: the logits of transformers' modules over the same code.

The twin reads every context anew, in one pass, over KV that plain torch writes and reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import ModelError
from kvchat.core.parameters import KV_CODES
from kvchat.engine.kv_storage import kv_geometry, require_kv_dtype, small_kv
from kvchat.model.batch import SequencePiece
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import model_over
from kvchat_kernels.coded_kv import CodedKv
from support.matrix import spread
from support.stateful_models import MAX_CONTEXT, STATEFUL, Chat, load_stateful, open_engine, words
from support.watched_logits import watched_logits

BLOCK = 16
# Gated delta nets, short convolutions, Mamba 2 alone and beside attention, Mamba 1, MLA, modules
# alone, and layers with a window.
FAMILIES = {
    "qwen3_5, compiled": "k8v4",
    "lfm2": "int8",
    "qwen3_next": "int4",
    "granitemoehybrid": "int8",
    "falcon_h1": "int4",
    "bamba": "fp8",
    "jamba, mamba-1": "k8v4",
    "zamba2": "int8",
    "nemotron_h": "int4",
    "olmo_hybrid": "k8v4",
    "kimi_linear": "int8",
    "minimax": "k8v4",
    "lfm3, windows": "int4",
    "zaya, windows": "int8",
}
NAMES = [name for name in FAMILIES if name in STATEFUL]
# In other steps than the twin's a number's last bits differ, and it may go to another level.
TIE = 0.03


@dataclass
class Coded:
    """A model and its twin, and the code of their KV."""

    name: str
    loaded: LoadedModel
    twin: LoadedModel
    code: str

    def opened(self, directory: Path | None = None, **settings: object) -> Chat:
        settings = {"kv_dtype": self.code, "step_tokens": 7, **settings}
        engine = open_engine(self.loaded, directory, **settings)  # type: ignore[arg-type]
        return Chat(self.loaded.module, engine)

    def twin_logits(self, ids: Sequence[int], code: str = "") -> torch.Tensor:
        """Return the logits after every token, [num_tokens, vocab_size]."""
        config = CacheConfig(kv_dtype=code or self.code)
        geometry = kv_geometry(self.twin.spec, config, self.twin.dtype)
        blocks = range(1, 2 + len(ids) // BLOCK)
        model = model_over(self.twin, small_kv(geometry, self.twin.device, 1 + len(blocks), BLOCK))
        assert model.compiled is None
        piece = SequencePiece(list(ids), 0, blocks, len(ids), model.new_state())
        return model.forward_pieces([piece], BLOCK)

    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Each token of an answer is the twin's likeliest, or as likely but for rounding."""
        logits = self.twin_logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) / logits.std(1)).max() < TIE

    def ask(self, chat: Chat, prompt: Sequence[int], num_samples: int = 1) -> list[int]:
        """Return an answer, which is a right one, as that of all samples."""
        answers = chat.ask(prompt, num_samples=num_samples)
        for answer in answers:
            self.check(prompt, answer.ids)
        return answers[0].ids


def load_coded(name: str, code: str, directory: Path) -> Coded:
    _, loaded = load_stateful(name, directory)
    config = ModelConfig(dtype="float32")
    other = load_model(find_model(str(directory)), config, MAX_CONTEXT, lambda _: None)
    return Coded(name, loaded, replace(other, compiled=None), code)


@pytest.fixture(scope="module", params=spread(NAMES, NAMES[:2]))
def coded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Coded:
    return load_coded(request.param, FAMILIES[request.param], tmp_path_factory.mktemp("model"))


def chat_of_turns(coded: Coded, chat: Chat) -> tuple[list[int], list[int]]:
    """Ask a forked question in parts, and two more; return the last prompt and answer."""
    prompt = words(100, seed=1)
    for turn, num_samples in enumerate((2, 1, 1)):
        answer = coded.ask(chat, prompt, num_samples)
        if turn < 2:
            prompt = [*prompt, *answer, *words(19, seed=turn)]
    return prompt, answer


def test_logits_are_those_of_the_modules_over_the_same_code(coded: Coded) -> None:
    chat = coded.opened()
    layers = chat.engine.cache.kv_pool.layers
    assert all(isinstance(layer, CodedKv) and layer.code.name == coded.code for layer in layers)
    assert isinstance(chat.engine.cache.kv_pool, WindowedKvPool) == ("windows" in coded.name)
    watched = watched_logits(chat.engine, "run")

    prompt, answer = chat_of_turns(coded, chat)

    own = torch.cat(watched[-len(answer) :])
    ids = [*prompt, *answer[:-1]]
    twin, plain = (coded.twin_logits(ids, x)[len(prompt) - 1 :] for x in (coded.code, "auto"))
    off, off_plain = (torch.linalg.norm(own - x) for x in (twin, plain))
    assert off < 0.01 * torch.linalg.norm(twin)
    assert off < 0.5 * off_plain, "that is not this code"


def test_a_batch_of_branches_and_edits_does_not_mix(coded: Coded) -> None:
    """Snapshots of earlier turns stand so far apart as their size says."""
    chat = coded.opened()
    context, ends = words(70, seed=3), []
    for turn in range(3):
        context = [*context, *coded.ask(chat, context)]
        ends.append(context)
        context = [*context, *words(9, seed=turn)]
    prompts = [[*end, *words(5, seed=50 + turn)] for turn, end in enumerate(ends)]

    answers = chat.ask(*prompts)

    for prompt, answer in zip(prompts, answers, strict=True):
        coded.check(prompt, answer.ids)
    assert answers[-1].num_cached >= len(ends[-1]) - BLOCK


def test_a_restart_goes_on_at_every_turn_with_the_same_numbers(coded, tmp_path):
    chat, context, ends = coded.opened(tmp_path), words(70, seed=5), []
    for turn in range(3):
        context = [*context, *coded.ask(chat, context)]
        ends.append(context)
        context = [*context, *words(30, seed=turn)]
    prompts = [[*end, 2, 2] for end in ends]
    before = logits_of(chat, prompts[-1])
    chat.engine.close()

    for number, prompt in enumerate(prompts):
        again = coded.opened(tmp_path)
        watched = watched_logits(again.engine, "run")
        [answer] = again.ask(prompt)
        again.engine.close()
        coded.check(prompt, answer.ids)
        assert answer.num_from_disk >= len(ends[number]) - 2 * BLOCK
    assert torch.equal(torch.cat(watched), before)


def logits_of(chat: Chat, prompt: Sequence[int]) -> torch.Tensor:
    watched = watched_logits(chat.engine, "run")
    [answer] = chat.ask(prompt)
    assert answer.num_cached
    return torch.cat(watched)


def test_a_preempted_request_goes_on(coded: Coded) -> None:
    chat = coded.opened()
    engine, prompts = chat.engine, [words(70, seed=3), words(75, seed=4)]
    chat.preempt_at(5, 8, 26)
    answers = chat.ask(*prompts)

    assert engine.status().num_preempted == 3
    for prompt, answer in zip(prompts, answers, strict=True):
        coded.check(prompt, answer.ids)


def test_blocks_and_snapshots_go_to_host_memory_and_back(coded: Coded) -> None:
    probe = coded.opened().engine.cache
    per_token = probe.kv_pool.geometry.block_bytes / BLOCK
    room = int(per_token * 250) + 3 * probe.num_state_blocks * probe.kv_pool.geometry.block_bytes
    chat = coded.opened(num_bytes=room, host_bytes=8 << 20)
    prompt = words(150, seed=6)
    first = coded.ask(chat, prompt)
    for seed in range(3):
        coded.ask(chat, words(150, seed=100 + seed))
    assert chat.engine.cache.num_reusable_tokens(prompt) == 0
    prompt = [*prompt, *first, 7]

    [second] = chat.ask(prompt)

    coded.check(prompt, second.ids)
    assert second.num_from_host >= len(prompt) - 2 * BLOCK
    chat.engine.close()


def test_what_more_bits_have_kept_serves_fewer(coded: Coded, tmp_path: Path) -> None:
    """At every turn of a chat; after a snapshot of another context nothing would be near."""
    chat, context, ends = coded.opened(tmp_path, kv_dtype="auto"), words(70, seed=5), []
    for turn in range(3):
        [answer] = chat.ask(context)
        context = [*context, *answer.ids]
        ends.append(context)
        context = [*context, *words(30, seed=turn)]
    chat.engine.close()

    for end in ends:
        again = coded.opened(tmp_path)
        prompt = [*end, 2, 2]
        watched = watched_logits(again.engine, "run")
        [answer] = again.ask(prompt)
        assert answer.num_cached >= len(end) - 2 * BLOCK
        assert answer.num_cached > answer.num_from_disk, "not converted"
        own = torch.cat(watched[-len(answer.ids) :])
        ids = [*prompt, *answer.ids[:-1]]
        twin, plain = (coded.twin_logits(ids, x)[len(prompt) - 1 :] for x in (coded.code, "auto"))
        assert torch.linalg.norm(own - plain) < 1.5 * torch.linalg.norm(twin - plain)
        again.engine.close()
        once_more = coded.opened(tmp_path)
        [answer] = once_more.ask(prompt)
        assert answer.num_from_disk >= len(end) - 2 * BLOCK, "converted once"
        once_more.engine.close()


@pytest.mark.parametrize("name", [n for n in STATEFUL if "no attention" in n or n == "rwkv"])
def test_a_model_without_attention_has_no_kv_to_round(name: str, tmp_path: Path) -> None:
    _, loaded = load_stateful(name, tmp_path)
    for code in KV_CODES:
        with pytest.raises(ModelError, match="it has no attention, and so no KV") as caught:
            require_kv_dtype(name, loaded.spec, CacheConfig(kv_dtype=code))
    assert caught.value.hint == "Use --kv-dtype auto."
