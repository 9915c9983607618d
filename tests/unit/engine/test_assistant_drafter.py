"""Drafts by a drafter of Gemma 4 over the model's own KV: what it computes, and that texts stay."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvchat.chat.chat_model import read_chat_model
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig
from kvchat.core.errors import ModelUnsupported
from kvchat.core.types import NO_MEMORY
from kvchat.engine.assembly import _DraftBuild
from kvchat.engine.assistant_drafter import AssistantDrafter
from kvchat.engine.engine import Engine
from kvchat.engine.speculation import Mode
from kvchat.model.assistant import Assistant
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import inspect_model
from kvchat.model.spec import Gathered
from support.assistants import WithAssistant, write_with_assistant
from support.checkpoints import save_checkpoint, tiny_model
from support.engines_with_drafts import answer, answers_at_once, build
from support.fixed_drafts import FixedDraftPolicy
from support.stateful_models import words


@pytest.fixture(scope="module", params=[False, True])
def pair(request, tmp_path_factory) -> tuple[WithAssistant, Path]:
    """A drafter with all logits, and one that chooses clusters of tokens first."""
    directory = tmp_path_factory.mktemp("pair")
    models = write_with_assistant(directory, is_ordered=request.param)
    return models, directory


def engine_of(directory: Path, **settings: object) -> Engine:
    assembled = build(directory / "target", directory / "drafter", **settings)
    assert not assembled.ready.notes
    engine = assembled.engine
    engine.speculation._policy = FixedDraftPolicy(3)
    assert engine.speculation.drafter(AssistantDrafter) is not None
    return engine


def test_its_logits_are_those_of_transformers(pair, monkeypatch):
    """Behind the window's beginning, guesses after guesses, and in a turn from the cache."""
    models, directory = pair
    engine = engine_of(directory)
    drafter = engine.speculation.drafter(AssistantDrafter)
    assert drafter is not None
    seen: list[tuple[list[int], list[int], torch.Tensor]] = []
    guess, propose = drafter._model.guess, drafter.propose
    due: list[list[int]] = []

    def noting(tokens, pieces, hidden):  # type: ignore[no-untyped-def]
        logits, states = guess(tokens, pieces, hidden)
        [ids], [token] = due, tokens
        known = seen[-1][1] if seen and seen[-1][0] == ids else None
        guesses = [] if known is None else [*known, token]
        seen.append((ids, guesses, logits[0].clone()))
        return logits, states

    def proposing(wanted):  # type: ignore[no-untyped-def]
        due[:] = [list(want.request.ids) for want in wanted]
        return propose(wanted)

    monkeypatch.setattr(drafter._model, "guess", noting)
    monkeypatch.setattr(drafter, "propose", proposing)
    engine.speculation.switch(Mode.DRAFT)
    first = words(75, seed=1)
    [given] = answer(engine, first, 12)
    answer(engine, [*first, *given, *words(9, seed=2)], 12)
    assert not engine.speculation.failures
    assert {len(guesses) for _, guesses, _ in seen} == {0, 1, 2}
    for ids, guesses, row in seen[::2]:
        expected, known = models.logits(ids, guesses), row.isfinite()
        assert known.sum() in (4 * 17, len(row))
        torch.testing.assert_close(row[known], expected[known], rtol=1e-3, atol=1e-3)
    engine.close()


def test_answers_are_those_without_drafts(pair: tuple[WithAssistant, Path], tmp_path: Path) -> None:
    """Greedy and drawn, samples, branches, and again after a restart."""
    _, directory = pair
    context: list[int] = []
    for turn in range(4):
        engine = engine_of(directory, kv=tmp_path / "kv")
        prompt = [*context[: (40, 400)[turn % 2]], *words(30 + turn, turn)]
        heat, num_samples = (0.0, 0.9)[turn // 2], 1 + turn % 2
        engine.speculation.switch(Mode.OFF)
        plain = answer(engine, prompt, 16, heat, num_samples)
        engine.speculation.switch(Mode.DRAFT)
        assert answer(engine, prompt, 16, heat, num_samples) == plain
        assert engine.speculation.status().total.num_verified
        assert engine.speculation._policy.sources == {"head"}  # it was trained for the model
        assert not engine.speculation.failures
        context = [*prompt, *plain[0]]
        engine.close()


@pytest.mark.parametrize("has_groups", [False, True])
def test_requests_at_once_have_the_answers_of_each(pair, has_groups, monkeypatch):
    """A step of more rows than a group takes has several groups."""
    if has_groups:
        monkeypatch.setattr("kvchat.model.cpu.compiled_step.FEW_ROWS", 2)
        monkeypatch.setattr("kvchat.model.cpu.compiled_step._RESULT_BYTES", 1)
    _, directory = pair
    engine = engine_of(directory)
    prompts = [tuple(words(20 + 7 * index, index)) for index in range(4)]
    engine.speculation.switch(Mode.OFF)
    plain = [answer(engine, prompt, 16)[0] for prompt in prompts]
    engine.speculation.switch(Mode.DRAFT)
    assert answers_at_once(engine, prompts, 16) == plain
    assert not engine.speculation.failures
    engine.close()


@pytest.fixture
def found(pair: tuple[WithAssistant, Path], tmp_path: Path) -> Path:
    """A model that has its drafter in its own directory."""
    shutil.copytree(pair[1] / "target", tmp_path / "target")
    shutil.copytree(pair[1] / "drafter", tmp_path / "target" / "assistant")
    return tmp_path / "target"


def test_a_drafter_that_was_found_is_named_and_may_fail(found: Path) -> None:
    """The one without weights leaves the model without drafts, with a sentence."""
    for note in (f"{found}/assistant drafts", "Answers come without the draft model"):
        assembled = build(found, None)
        [said] = assembled.ready.notes
        assert said.startswith(note)
        assert len(answer(assembled.engine, words(20, seed=1), 5)[0]) == 5
        assembled.engine.close()
        (found / "assistant" / "model.safetensors").unlink(missing_ok=True)


def test_a_drafter_is_found_only_where_it_can_draft(found: Path) -> None:
    """On a GPU or on the gathered path each start named a drafter that could not draft."""
    assembled = build(found, None)
    assembled.engine.close()
    here = assembled.loaded
    settings = ModelConfig(), CacheConfig(), EngineConfig(), NO_MEMORY
    gathered = replace(here.spec, gathered=Gathered("is a trial", (), 0))
    elsewhere = replace(here, device=torch.device("cuda")), replace(here, spec=gathered)
    assert _DraftBuild(here, *settings).own_source() is not None
    for target in elsewhere:
        assert _DraftBuild(target, *settings).own_source() is None


@pytest.mark.parametrize("read", [inspect_model, read_chat_model])
def test_a_drafter_given_as_the_model_is_named(pair, read):
    directory = pair[1] / "drafter"
    with pytest.raises(ModelUnsupported, match=f"drafter of Gemma 4.*--draft {directory}"):
        read(find_model(str(directory)))


def test_a_drafter_of_another_model_is_refused(pair, tmp_path):
    _, directory = pair
    other = save_checkpoint(tmp_path, tiny_model("llama", hidden_size=32))
    assembled = build(other, directory / "drafter")
    [note] = [note for note in assembled.ready.notes if "draft model" in note]
    assert "a drafter of another model" in note
    assert len(answer(assembled.engine, words(20, seed=1), 5)[0]) == 5
    assembled.engine.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers of more than"),
        ({"intermediate_size": 10**9}, "a larger model than its weight files hold"),
    ],
)
def test_a_drafter_larger_than_its_files_is_refused(pair, settings, reason, tmp_path):
    _, directory = pair
    shutil.copytree(directory / "drafter", tmp_path / "drafter")
    file = tmp_path / "drafter" / "config.json"
    content = json.loads(file.read_text())
    content["text_config"] |= settings
    file.write_text(json.dumps(content))
    assembled = build(directory / "target", tmp_path / "drafter")
    [note] = [note for note in assembled.ready.notes if "draft model" in note]
    assert reason in note
    assembled.engine.close()


def test_a_drafter_whose_heads_share_no_heads_of_kv_is_refused(pair, tmp_path):
    """Three heads over two of KV: kernels take one each, and would compute two."""
    _, directory = pair
    shutil.copytree(directory / "drafter", tmp_path / "drafter")
    file, config = (tmp_path / "drafter" / name for name in ("model.safetensors", "config.json"))
    tensors = load_file(file)
    for name, part in tensors.items():
        if name.endswith("q_proj.weight"):
            tensors[name] = part[: 3 * len(part) // 4].contiguous()
        elif name.endswith("o_proj.weight"):
            tensors[name] = part[:, : 3 * part.shape[1] // 4].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    content = json.loads(config.read_text())
    content["text_config"]["num_attention_heads"] = 3
    config.write_text(json.dumps(content))
    assembled = build(directory / "target", tmp_path / "drafter")
    [note] = [note for note in assembled.ready.notes if "draft model" in note]
    assert "a drafter of another model" in note
    assembled.engine.close()


def test_a_drafter_that_cannot_read_the_kv_is_left_out_with_a_note(pair, monkeypatch):
    def refuse(*args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Assistant, "read_from", refuse)
    _, directory = pair
    assembled = build(directory / "target", directory / "drafter")
    assert assembled.ready.draft is None
    assert "Answers come without the draft model: RuntimeError: no such kernel." in (
        assembled.ready.notes
    )
    assert len(answer(assembled.engine, words(20, seed=1), 5)[0]) == 5
    assembled.engine.close()


def test_a_drafter_that_cannot_take_hidden_states_is_asked_no_more(pair, monkeypatch):
    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(AssistantDrafter, "read_hidden", fail)
    engine = engine_of(pair[1])
    engine.speculation.switch(Mode.DRAFT)
    assert len(answer(engine, words(20, seed=1), 5)[0]) == 5
    assert [*engine.speculation.failures] == ["draft"]
    engine.close()
