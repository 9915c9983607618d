"""KV of a context's end, moved to a shorter context: it is what transformers' own cache is whose
keys are turned back, and it is found by its conversation alone, until its own KV is there.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvchat.cache.kv_pool import CodedFormat, KvGeometry, KvPool, LayerGeometry
from kvchat.core.events import SampleFinished, TokensGenerated
from kvchat.core.types import SamplingParams
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from kvchat_kernels.key_rotation import KeyRotation
from kvchat_kernels.kv_code import INT8, K8V4, KvCode
from support.private_tables import greedy_over
from support.specimens import Specimen, engine_on, random_ids

READ, MORE = random_ids(90, 1), random_ids(5, 2)
# The first tokens stay, those up to 51 are left out: 37 positions, no multiple of a block's 8.
NUM_OWN, NUM_BACK = 14, 37
CHAT = "a conversation"


def answer(
    engine: Engine, prompt: list[int], name: str = "", num_tokens: int = 12
) -> tuple[list[int], int]:
    """Return a greedy answer, and how many tokens of the prompt were cached."""
    greedy = SamplingParams(temperature=0.0)
    spec = RequestSpec(tuple(prompt), greedy, max_tokens=num_tokens, moved_under=name)
    request_id, tokens = engine.submit(spec), []
    while True:
        for event in engine.step():
            if event.request_id != request_id:
                continue
            if isinstance(event, TokensGenerated):
                tokens.extend(event.token_ids)
            elif isinstance(event, SampleFinished):
                return tokens, event.usage.cached.total
        engine.cache.check([request.table for request in engine.running() if request.table])


def left_out(context: list[int], num_own: int = NUM_OWN, num_back: int = NUM_BACK) -> list[int]:
    return [*context[:num_own], *context[num_own + num_back :]]


@torch.inference_mode()
def moved_by_transformers(made: Specimen, context: list[int], more: list[int]) -> list[int]:
    """The greedy answer of transformers over a cache without some tokens, whose keys behind them
    were turned back by its own code.
    """
    model, cached = made.reference, DynamicCache()
    model(torch.tensor([context]), past_key_values=cached)
    rotary = model.model.rotary_emb
    for layer in cached.layers:
        cos, sin = rotary(layer.keys, torch.tensor([[-NUM_BACK]]))
        behind = layer.keys[:, :, NUM_OWN + NUM_BACK :]
        scaling = rotary.attention_scaling  # the keys have it already
        turned, _ = apply_rotary_pos_emb(behind, behind, cos / scaling, sin / scaling)
        layer.keys = torch.cat((layer.keys[:, :, :NUM_OWN], turned), dim=2)
        values = layer.values
        layer.values = torch.cat(
            (values[:, :, :NUM_OWN], values[:, :, NUM_OWN + NUM_BACK :]), dim=2
        )
    return greedy_over(model, cached, more, len(context) - NUM_BACK, 12)


@pytest.mark.parametrize("name", ["llama", "llama, yarn"])
def test_an_answer_over_moved_kv_is_that_of_transformers_over_turned_keys(specimen, name):
    """And the KV of its own, read while nothing else runs, gives the exact answer."""
    made = specimen(name)
    engine = engine_on(made.loaded)
    answer(engine, [*READ, 0], num_tokens=1)
    prompt = [*left_out(READ), *MORE]

    assert engine.move_kv(READ, left_out(READ), NUM_OWN, CHAT) == len(READ) - NUM_BACK

    expected, exact = moved_by_transformers(made, READ, MORE), made.generate(prompt)[:12]
    assert expected != exact
    assert answer(engine, prompt, CHAT) == (expected, len(READ) - NUM_BACK)
    assert answer(engine, prompt) == (exact, NUM_OWN), "another conversation found moved KV"


def test_moved_kv_gives_way_to_the_contexts_own_while_nothing_else_runs(specimen: Any) -> None:
    made = specimen("llama")
    engine = engine_on(made.loaded)
    answer(engine, [*READ, 0], num_tokens=1)
    assert not engine.has_work
    engine.move_kv(READ, left_out(READ), NUM_OWN, CHAT)
    prompt = [*left_out(READ), *MORE]
    moved, _ = answer(engine, prompt, CHAT)

    while engine.has_work:
        engine.step()

    following = [*prompt, *moved, *MORE]
    exact = made.generate(following)[:12]
    num_known = len(prompt) + len(moved) - 1
    assert answer(engine, following, CHAT) == (exact, num_known)
    assert engine.cache.num_moved_tokens(prompt) == 0
    engine.cache.check([])


def test_turns_and_a_second_move_go_on_over_moved_kv(specimen: Any) -> None:
    """Each reads its own tokens only; all of it comes of KV that was moved twice."""
    engine = engine_on(specimen("llama").loaded)
    context, num_cached = READ[:], 0
    answer(engine, [*context, 0], num_tokens=1)
    for turn in range(6):
        if turn % 2 == 0:
            shorter = left_out(context, num_back=20 + turn)
            assert engine.move_kv(context, shorter, NUM_OWN, CHAT) == len(shorter) - (turn > 0)
            context, num_cached = shorter, len(shorter) - (turn > 0)
        prompt = [*context, *random_ids(7, turn + 3)]
        tokens, num_found = answer(engine, prompt, CHAT, num_tokens=6)
        assert num_found == num_cached
        context = [*prompt, *tokens]
        num_cached = len(context) - 1
        assert engine.has_work, "nothing is left to read exactly"
    engine.cache.check([])


@pytest.mark.parametrize(
    ("name", "num_window_blocks"),
    [
        ("llama", 0),
        ("glm4", 0),
        ("smollm3, some layers without positions", 0),
        ("gemma3, mixed windows", 0),
        ("gemma3, mixed windows", 40),
    ],
)
def test_the_first_layers_moved_kv_is_what_is_computed_there(specimen, name, num_window_blocks):
    """Its keys depend on token and position alone: turned, they are those of the new position."""
    engine = engine_on(specimen(name).loaded, num_window_blocks=num_window_blocks)
    shorter, pool = left_out(READ), engine.cache.kv_pool
    answer(engine, [*READ, 0], num_tokens=1)
    assert engine.move_kv(READ, shorter, NUM_OWN, CHAT) == len(shorter)
    answer(engine, [*shorter, 0], num_tokens=1)

    tables = [engine.cache.match([*shorter, 0], name) for name in ("", CHAT)]
    num_compared = 0
    for index, pair in enumerate(zip(*(table.blocks for table in tables), strict=True)):
        if num_window_blocks and not engine.cache.kv_pool.blocks.are_there(pair).all():
            continue  # behind the window of the first layer
        for slot in range(min(8, len(shorter) - 8 * index)):
            off, _, length = pool.kv_error(*pair, slot)[0].tolist()
            assert off <= 1e-9 * length
            num_compared += 1
    assert num_compared >= (8 if num_window_blocks else len(shorter))
    for table in tables:
        engine.cache.release(table, [])
    engine.cache.check([])


@pytest.mark.parametrize("name", ["gpt2, learned positions", "deepseek_v3, wide keys"])
def test_keys_of_other_embeddings_stay_where_they_are(specimen: Any, name: str) -> None:
    """What stays of the context is read again, as before."""
    made = specimen(name)
    engine = engine_on(made.loaded)
    answer(engine, [*READ, 0], num_tokens=1)
    assert engine.move_kv(READ, left_out(READ), NUM_OWN, CHAT) == 0
    prompt = [*left_out(READ), *MORE]
    assert answer(engine, prompt, CHAT) == (made.generate(prompt)[:12], NUM_OWN)


def test_what_the_device_lacks_is_not_moved(specimen: Any) -> None:
    """Nothing, where all of the end was never read; else what is there, and the rest is read."""
    made = specimen("llama")
    engine = engine_on(made.loaded)
    shorter = left_out(READ)
    answer(engine, [*READ[:40], 0], num_tokens=1)
    assert engine.move_kv(READ, shorter, NUM_OWN, CHAT) == 0
    answer(engine, [*READ[:70], 0], num_tokens=1)
    assert engine.move_kv(READ, shorter, NUM_OWN, CHAT) == 70 - NUM_BACK
    assert answer(engine, [*shorter, *MORE], CHAT)[1] == 70 - NUM_BACK


def test_forgetting_any_context_forgets_moved_kv(specimen: Any) -> None:
    """Its tokens have read what was left out, and perhaps that is to be forgotten."""
    engine = engine_on(specimen("llama").loaded)
    answer(engine, [*READ, 0], num_tokens=1)
    engine.move_kv(READ, left_out(READ), NUM_OWN, CHAT)
    engine.locate([READ], lambda found: None)  # it measures, and forgets what it measured with
    assert engine.cache.num_moved_tokens(left_out(READ)) > 0
    engine.forget([(READ, 0)], lambda: None)
    assert engine.cache.num_moved_tokens(left_out(READ)) == 0
    engine.cache.check([])


@pytest.mark.parametrize("code", [INT8, K8V4], ids=lambda code: code.name)
def test_coded_keys_are_restored_turned_and_rounded_again(code: KvCode) -> None:
    """Off by no more than rounding once; values and whole copies keep their bytes."""
    torch.manual_seed(1)
    geometry = KvGeometry((LayerGeometry(2, 64, 32),), torch.float32, 8, CodedFormat(code))
    pool = KvPool(geometry, 6, torch.device("cpu"))
    [layer] = pool.layers
    keys, values = torch.randn(16, 2, 64), torch.randn(16, 2, 32)
    layer.write(keys, values, torch.arange(8, 24))
    rotation = KeyRotation(0.5 ** torch.arange(32, dtype=torch.float64))

    pool.move_slots(range(8, 24), range(29, 45), [rotation], 11)
    pool.move_slots(range(8, 11), range(25, 28), [rotation], 0)

    rows = [tensor.flatten(0, 1) for tensor in layer.tensors]
    moved = code.keys.plain(rows[0][29:45], rows[1][29:45])
    expected = rotation.moved(keys, 11)
    assert (moved - expected).norm() < 0.02 * expected.norm()
    for numbers in rows[2:]:
        assert torch.equal(numbers[29:45], numbers[8:24])
    for numbers in rows:
        assert torch.equal(numbers[25:28], numbers[8:11])
