"""Models with recurrent state and layers with a window: the answers and logits of transformers.

Every chat passes the window of 20 tokens more than ten times, in steps of 7 tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvchat.cache.windowed_pool import WindowedKvPool
from kvchat.core.events import RequestEvent
from kvchat.engine.engine import Engine
from support.matrix import spread
from support.stateful_models import STATEFUL, Chat, Loaded, load_stateful, open_engine, words
from support.watched_logits import watched_logits

BLOCK = 16
FAMILIES = [name for name in ("lfm3, windows", "zaya, windows") if name in STATEFUL]
# Room for 400 tokens in layers without a window, and for about a third of that in others.
FEW = 230_000


@pytest.fixture(scope="module", params=spread(FAMILIES, FAMILIES[:1]))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_stateful(request.param, tmp_path_factory.mktemp("model"))


def opened(
    made: Loaded, directory: Path | None = None, num_bytes: int = FEW, **settings: object
) -> Chat:
    engine = open_engine(made[1], directory, num_bytes, step_tokens=7, **settings)  # type: ignore
    assert isinstance(engine.cache.kv_pool, WindowedKvPool)
    return Chat(made[0], engine)


def in_use(engine: Engine) -> int:
    blocks = engine.cache.kv_pool.blocks  # type: ignore[attr-defined]
    return blocks.num_usable - blocks.num_available


def ask(chat: Chat, prompt: Sequence[int], num_samples: int = 1) -> list[int]:
    """Return an answer, which is the right one, as that of all samples."""
    answers = chat.ask(prompt, num_samples=num_samples)
    for answer in answers:
        assert answer.ids == chat.right_answer(prompt, answer.ids)
    return answers[0].ids


def test_logits_are_transformers_own_and_those_where_all_is_kept(made: Loaded) -> None:
    engine = open_engine(made[1], None, step_tokens=7, whole_windows=True)
    assert not isinstance(engine.cache.kv_pool, WindowedKvPool)
    whole = watched_logits(engine, "run")
    chat_of_turns(Chat(made[0], engine))
    chat = opened(made)
    windowed = watched_logits(chat.engine, "run")

    prompt, answer = chat_of_turns(chat)

    assert len(windowed) == len(whole) >= 50
    assert all(torch.equal(one, other) for one, other in zip(windowed, whole, strict=True))
    with torch.inference_mode():
        right = made[0](torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    own = torch.cat(windowed[-len(answer) :])
    assert (own - right[len(prompt) - 1 : -1]).abs().max() < 1e-4 * right.abs().max()


def chat_of_turns(chat: Chat) -> tuple[list[int], list[int]]:
    """Ask a forked question of ten windows, and two more; return the last prompt and answer."""
    prompt = words(200, seed=1)
    for turn, num_samples in enumerate((2, 1, 1)):
        answer = ask(chat, prompt, num_samples)
        if turn < 2:
            prompt = [*prompt, *answer, *words(19, seed=turn)]
    return prompt, answer


def test_a_long_chat_uses_a_window_and_a_step(made: Loaded) -> None:
    chat = opened(made)
    engine, most = chat.engine, 0
    step = engine.step

    def watched() -> list[RequestEvent]:
        nonlocal most
        events = step()
        most = max(most, in_use(engine))
        return events

    engine.step = watched  # type: ignore[method-assign]
    ask(chat, words(300, seed=2))

    assert most <= 2 + 1 + 2, "blocks of a window, of the one after it, and of a step"
    assert in_use(engine) == 0
    status = engine.status()
    assert 0 < status.num_window_blocks < status.num_blocks


def test_turns_branches_and_edits_read_little_again(made: Loaded) -> None:
    chat = opened(made, num_bytes=4 * FEW)
    context, ends = words(150, seed=3), []
    for turn in range(4):
        context = [*context, *ask(chat, context)]
        ends.append(context)
        context = [*context, *words(9, seed=turn)]
    for turn, end in enumerate(ends):
        [answer] = chat.ask([*end, *words(5, seed=50 + turn)])
        prompt = [*end, *words(5, seed=50 + turn)]
        assert answer.ids == chat.right_answer(prompt, answer.ids)
        assert answer.num_cached >= len(end) - 3 * BLOCK


def test_little_room_changes_no_answer(made: Loaded) -> None:
    """Chats by turns: each loses windows and snapshots to the others, or both."""
    chat = opened(made, num_bytes=FEW // 2)
    contexts = [words(80 + 10 * n, seed=n) for n in range(3)]
    for turn in range(4):
        for number, context in enumerate(contexts):
            answer = ask(chat, context)
            contexts[number] = [*context, *answer, *words(3, seed=turn)]


def test_chats_in_one_step_do_not_mix(made: Loaded) -> None:
    chat = opened(made, num_bytes=4 * FEW)
    prompts = [words(length, seed=7) for length in (5, 61, 90, 130)]

    answers = chat.ask(*prompts)

    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == chat.right_answer(prompt, answer.ids)


def test_a_preempted_request_goes_on(made: Loaded) -> None:
    chat = opened(made, num_bytes=4 * FEW)
    engine, prompts = chat.engine, [words(70, seed=3), words(75, seed=4)]
    chat.preempt_at(5, 8, 26)
    answers = chat.ask(*prompts)

    assert engine.status().num_preempted == 3
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == chat.right_answer(prompt, answer.ids)


# Slower tiers


def test_a_restart_goes_on_at_every_turn(made: Loaded, tmp_path: Path) -> None:
    """Also at turns that another followed: the window before each end is on the disk."""
    chat, context, ends = opened(made, tmp_path), words(150, seed=5), []
    for turn in range(3):
        context = [*context, *ask(chat, context)]
        ends.append(context)
        context = [*context, *words(30, seed=turn)]
    chat.engine.close()

    for end in ends:
        again = opened(made, tmp_path)
        prompt = [*end, 2, 2]
        [answer] = again.ask(prompt)
        again.engine.close()
        assert answer.ids == again.right_answer(prompt, answer.ids)
        assert answer.num_from_disk >= len(end) - 2 * BLOCK


def test_both_go_to_host_memory_and_back(made: Loaded) -> None:
    chat = opened(made, host_bytes=8 << 20)
    prompt = words(250, seed=6)
    first = ask(chat, prompt)
    for seed in range(3):
        ask(chat, words(250, seed=100 + seed))
    assert chat.engine.cache.num_reusable_tokens(prompt) == 0
    prompt = [*prompt, *first, 7]

    [second] = chat.ask(prompt)

    assert second.ids == chat.right_answer(prompt, second.ids)
    assert second.num_from_host >= len(prompt) - 2 * BLOCK
    chat.engine.close()


def test_what_is_forgotten_takes_both_along(made: Loaded) -> None:
    chat = opened(made, num_bytes=4 * FEW)
    prompt = words(100, seed=8)
    context = [*prompt, *ask(chat, prompt)]
    beside = words(100, seed=9)
    ask(chat, beside)

    chat.engine.forget([(context, 40)], lambda: None)

    assert chat.engine.cache.num_reusable_tokens(context) <= 40
    assert chat.engine.cache.num_reusable_tokens(beside) == 96
    chat.engine.cache.check([])
    ask(chat, context)
