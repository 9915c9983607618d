"""Drafts by an EAGLE-3 head: what it computes, that texts stay, and which heads are refused.

Random heads guess almost nothing right, so tests compare logits with those of a plain twin.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from kvchat.chat.chat_model import read_chat_model
from kvchat.core.errors import ModelUnsupported
from kvchat.engine.engine import Engine
from kvchat.engine.head_drafter import HeadDrafter
from kvchat.engine.speculation import Mode
from kvchat.model.checkpoint.drafters import eagle_form
from kvchat.model.checkpoint.source import ModelSource, find_model
from kvchat.model.loader import inspect_model
from kvchat.model.packed.quantise import pack_of, packed_table
from support.checkpoints import save_checkpoint, tiny_model
from support.eagle_heads import write_eagle
from support.engines_with_drafts import answer, answers_at_once, build
from support.fixed_drafts import FixedDraftPolicy
from support.gguf_files import write_gguf
from support.matrix import spread
from support.stateful_models import STATEFUL, words

STYLES = ("specforge", "speculators", "own parts")
TARGETS = {
    "llama": ("llama", {}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 24}),
    "qwen3_5": STATEFUL["qwen3_5, compiled"],
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory) -> tuple[object, Path]:
    model_type, settings = TARGETS[request.param]
    model = tiny_model(model_type, **settings)
    return model, save_checkpoint(tmp_path_factory.mktemp("target"), model)


def drafter_of(engine: Engine) -> HeadDrafter:
    found = engine.speculation.drafter(HeadDrafter)
    assert found is not None
    assert found.name == "draft"
    return found


class Spy:
    """Notes the logits from which an engine's head draws, with the context of each, and how many
    of its last ids are guesses.
    """

    def __init__(self, drafter: HeadDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], int, torch.Tensor]] = []
        run = drafter._run

        def noting(pieces, given):  # type: ignore[no-untyped-def]
            logits, hidden = run(pieces, given)
            self._logits = logits.clone()
            return logits, hidden

        drawn = drafter._drawn

        def draw(pieces, given, due, drafts):  # type: ignore[no-untyped-def]
            contexts = [
                ([*r.ids, *drafts[r]], len(drafts[r]), drafter._states[r].first) for r in due
            ]
            found = drawn(pieces, given, due, drafts)
            self.seen += [
                (ids, count, row)
                for (ids, count, first), row in zip(contexts, self._logits, strict=True)
                if not first
            ]
            return found

        monkeypatch.setattr(drafter, "_run", noting)
        monkeypatch.setattr(drafter, "_drawn", draw)


@pytest.mark.parametrize(
    ("style", "is_compiled"),
    spread(
        [(style, is_compiled) for style in STYLES for is_compiled in (True, False)],
        always=[("specforge", True), ("speculators", False), ("own parts", True)],
    ),
)
def test_its_logits_are_those_of_the_published_formulas(
    target: tuple[object, Path],
    style: str,
    is_compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over a prompt in parts, guesses after guesses, wrong ones, and a turn from the cache.

    Gemma's embedded tokens are scaled before they are normed, which differs by the epsilon.
    """
    model, directory = target
    head = write_eagle(tmp_path / "head", model, style)
    engine = build(directory, tmp_path / "head").engine
    drafter = drafter_of(engine)
    assert drafter._model.compiled is not None
    if not is_compiled:
        drafter._model.compiled = None
        engine._runner._model.compiled = None
    engine.speculation._policy = FixedDraftPolicy(3)
    spy = Spy(drafter, monkeypatch)
    first = words(75, seed=1)
    engine.speculation.switch(Mode.DRAFT)
    [given] = answer(engine, first, 12)
    answer(engine, [*first, *given, *words(9, seed=2)], 12)
    assert not engine.speculation.failures
    assert {count for _, count, _ in spy.seen} == {0, 1, 2}
    for ids, count, row in spy.seen[::2]:
        torch.testing.assert_close(
            row[head.places], head.logits(ids, count)[-1], rtol=5e-3, atol=5e-3
        )
        assert row.isfinite().sum() == len(head.places)
    drafter.cache.check([state.table for state in drafter._states.values()])
    engine.close()


def test_answers_are_those_without_drafts(target: tuple[object, Path], tmp_path: Path) -> None:
    """Greedy and drawn, branches, samples, a small cache, and again after restarts."""
    model, directory = target
    write_eagle(tmp_path / "head", model)
    rng, context = random.Random(0), list[int]()
    for turn in range(6):
        engine = build(directory, tmp_path / "head", tmp_path / "kv", 4 << 20).engine
        engine.speculation._policy = FixedDraftPolicy(3)
        for part in range(2):
            prompt = [*context[: rng.choice((len(context), 40))], *words(rng.randint(1, 60), turn)]
            heat, num_samples = rng.choice((0.0, 0.9)), 1 + (turn + part) % 2
            engine.speculation.switch(Mode.OFF)
            plain = answer(engine, prompt, 12, heat, num_samples)
            engine.speculation.switch(Mode.DRAFT)
            assert answer(engine, prompt, 12, heat, num_samples) == plain
            drafter = drafter_of(engine)
            drafter.cache.check([state.table for state in drafter._states.values()])
            context = [*prompt, *plain[0]][:200]
        assert engine.speculation.status().total.num_verified
        assert not engine.speculation.failures
        engine.close()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_nothing_is_kept_while_drafts_are_off(is_compiled: bool, tmp_path: Path) -> None:
    """Streams were copied in every step of a model with a head."""
    model = tiny_model("llama")
    directory = save_checkpoint(tmp_path / "target", model)
    write_eagle(tmp_path / "head", model)
    engine = build(directory, tmp_path / "head").engine
    engine.speculation._policy = FixedDraftPolicy(3)
    paged = engine._runner._model
    if not is_compiled:
        paged.compiled = None
    hooks = [layer._forward_pre_hooks for layer in paged._module.get_decoder().layers]

    engine.speculation.switch(Mode.OFF)
    if is_compiled:
        copy = paged.compiled._parts._operations.output("stream before 1", 64)
        copy.fill_(torch.nan)
    plain = answer(engine, words(50, seed=1), 20)
    assert not engine._runner.last_hidden
    assert not any(hooks)
    if is_compiled:
        assert copy.isnan().all()

    engine.speculation.switch(Mode.DRAFT)
    assert answer(engine, words(50, seed=1), 20) == plain
    assert engine.speculation.status().total.num_verified
    assert not engine.speculation.failures
    engine.close()


def test_requests_at_once_have_the_answers_of_each(tmp_path: Path) -> None:
    model = tiny_model("llama")
    directory = save_checkpoint(tmp_path / "target", model)
    write_eagle(tmp_path / "head", model)
    engine = build(directory, tmp_path / "head").engine
    engine.speculation._policy = FixedDraftPolicy(3)
    prompts = [tuple(words(20 + 7 * index, index)) for index in range(5)]
    engine.speculation.switch(Mode.OFF)
    plain = [answer(engine, prompt, 20)[0] for prompt in prompts]
    engine.speculation.switch(Mode.DRAFT)
    assert answers_at_once(engine, prompts, 20) == plain
    assert engine.speculation.status().total.num_verified > 20
    engine.close()


def test_a_head_that_guesses_right_is_accepted(tmp_path, monkeypatch):
    """One that repeats the model's own last token, of a model that does nothing else."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    directory = save_checkpoint(tmp_path / "target", model)
    table = model.model.embed_tokens.weight.detach().clone()
    third = torch.cat([torch.zeros(64, 128), torch.eye(64)], dim=1)
    write_eagle(
        tmp_path / "head",
        model,
        **{
            "fc.weight": third,
            "midlayer.self_attn.o_proj.weight": torch.zeros(64, 64),
            "midlayer.mlp.down_proj.weight": torch.zeros(64, 96),
            "norm.weight": torch.ones(64),
            "lm_head.weight": table,
            "d2t": torch.zeros(len(table), dtype=torch.int64),
        },
    )
    engine = build(directory, tmp_path / "head").engine
    engine.speculation._policy = FixedDraftPolicy(3)
    engine.speculation.switch(Mode.DRAFT)
    answer(engine, words(20, seed=1), 40)
    total = engine.speculation.status().total
    assert total.num_accepted == total.num_drafted > 20
    assert engine.speculation._policy.sources == {"head"}  # it was trained for the model
    engine.close()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_its_matrices_have_the_bits_of_the_models(weights: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    directory = save_checkpoint(tmp_path / "target", model)
    write_eagle(tmp_path / "head", model, "own parts")
    engine = build(directory, tmp_path / "head", weights=weights).engine
    drafter = drafter_of(engine)
    layers = [p for p in drafter._model.loaded.module.modules() if type(p) is nn.Linear]
    assert len(layers) == 9
    assert None not in map(pack_of, layers)
    assert drafter._model.compiled is not None
    engine.speculation._policy = FixedDraftPolicy(3)
    engine.speculation.switch(Mode.OFF)
    plain = answer(engine, words(50, seed=1), 20)
    engine.speculation.switch(Mode.DRAFT)
    assert answer(engine, words(50, seed=1), 20) == plain
    assert not engine.speculation.failures
    engine.close()


def test_the_models_table_may_be_in_blocks_of_a_gguf_file(tmp_path, monkeypatch):
    """Such a table has no rows of its own; the head has 8 bits then."""
    monkeypatch.setattr("kvchat.model.checkpoint.tensors._LARGE_TABLE_BYTES", 1)
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.inference_mode():
        write_gguf(tmp_path / "m.gguf", model, "Q8_0")
    write_eagle(tmp_path / "head", model)
    assembled = build(tmp_path / "m.gguf", tmp_path / "head", dtype="auto")
    assert not assembled.ready.notes
    assert packed_table(assembled.loaded.module.get_input_embeddings()) is not None
    engine = assembled.engine
    head = drafter_of(engine)._model.loaded.module
    assert pack_of(head.get_output_embeddings()) is not None
    engine.speculation._policy = FixedDraftPolicy(3)
    engine.speculation.switch(Mode.OFF)
    plain = answer(engine, words(50, seed=1), 20)
    engine.speculation.switch(Mode.DRAFT)
    assert answer(engine, words(50, seed=1), 20) == plain
    assert engine.speculation.status().total.num_verified
    assert not engine.speculation.failures
    engine.close()


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        ({}, {"fc.weight": torch.zeros(64, 96)}, "it reads 96 numbers"),
        ({}, {"d2t": torch.arange(90) * 4}, "its vocabulary is another"),
        ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(16)}, "another tensor"),
        ({}, {"midlayer.input_layernorm.weight": torch.ones(1)}, "input_layernorm.weight has"),
        ({}, {"midlayer.self_attn.q_proj.weight": torch.ones(16, 128)}, "q_proj.weight has"),
        ({}, {"midlayer.self_attn.k_proj.bias": torch.ones(3)}, "k_proj.bias has another shape"),
        ({}, {"embed_tokens.weight": torch.ones(512, 32)}, "embed_tokens.weight has"),
        ({}, {"lm_head.weight": torch.ones(86)}, "lm_head.weight has another shape"),
        ({"intermediate_size": 10**8}, {}, "a larger model than its weight files hold"),
        ({}, {"layers.1.mlp.up_proj.weight": torch.ones(96, 64)}, "another tensor, layers.1.mlp"),
        ({"architectures": ["EagleModel"], "draft_vocab_size": None}, {}, "EAGLE 1 or 2"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, {}, "layer 10"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["x"]}}, {}, "no numbers of layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "no EAGLE-3 head over"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_and_the_model_answers(
    config: dict[str, object], tensors: dict[str, torch.Tensor], reason: str, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    directory = save_checkpoint(tmp_path / "target", model)
    write_eagle(tmp_path / "head", model, **tensors)
    file = tmp_path / "head" / "config.json"
    content = {**json.loads(file.read_text()), **config}
    content = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(content))
    assembled = build(directory, tmp_path / "head")
    [note] = [note for note in assembled.ready.notes if "draft model" in note]
    assert reason in note
    assert len(answer(assembled.engine, words(20, seed=1), 5)[0]) == 5
    assembled.engine.close()


@pytest.mark.parametrize(
    "settings",
    [{"model_type": "phi3"}, {"num_hidden_layers": 36, "layer_types": ["full_attention"] * 36}],
)
def test_a_head_may_name_the_type_and_the_layers_of_its_model(settings, tmp_path):
    """Its one layer is Llama's all the same."""
    model = tiny_model("llama")
    directory = save_checkpoint(tmp_path / "target", model)
    write_eagle(tmp_path / "head", model)
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    assembled = build(directory, tmp_path / "head")
    assert not assembled.ready.notes
    assert drafter_of(assembled.engine)._model.compiled is not None
    assembled.engine.close()


@pytest.mark.parametrize("read", [inspect_model, read_chat_model])
def test_a_head_given_as_the_model_is_named(read, tmp_path):
    """It has no tokenizer, which would be missed first."""
    write_eagle(tmp_path, tiny_model("llama"))
    with pytest.raises(ModelUnsupported, match=f"EAGLE-3 head.*--draft {tmp_path}"):
        read(find_model(str(tmp_path)))


@pytest.mark.parametrize("name", ["Eagle2_5_VLForConditionalGeneration", "Eagle3_VLModel"])
def test_a_model_of_text_and_images_called_eagle_is_no_head(name: str, tmp_path: Path) -> None:
    content = {"architectures": [name], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert eagle_form(ModelSource("eagle", tmp_path)) is None
