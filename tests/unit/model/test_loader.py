"""Damaged checkpoints: every fault gives one clear sentence, and none is loaded in part."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.errors import ExitCode, ModelError, ModelUnsupported
from kvchat.core.events import LoadProgress
from kvchat.core.text import Size
from kvchat.engine import kv_storage
from kvchat.model.checkpoint.source import find_model
from kvchat.model.files.checkpoint_files import read_header
from kvchat.model.loader import LoadedModel, inspect_model, load_model
from support.assembled import assemble
from support.checkpoints import save_checkpoint, tiny_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("original"), tiny_model("llama"))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(original, tmp_path / "m"))


def load(directory: Path, dtype: str = "float32", limit: int | None = None) -> LoadedModel:
    return load_model(find_model(str(directory)), ModelConfig(dtype=dtype), limit, lambda _: None)


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def change_weights(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without(*fragments: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not any(f in name for f in fragments)
    }


def assert_refused(directory: Path, message: str, kind: type[ModelError] = ModelError) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(directory)
    assert type(caught.value) is kind
    assert caught.value.exit_code is ExitCode.MODEL
    assert "\n" not in str(caught.value)


def test_a_checkpoint_loads_and_its_numbers_are_the_files(checkpoint: Path) -> None:
    loaded = load(checkpoint)

    tensors = load_file(checkpoint / "model.safetensors")
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter, tensors[name])
        assert not parameter.requires_grad
    assert not loaded.module.training
    assert loaded.max_context == 512


@pytest.mark.parametrize("size", [0, 7, 2000, -4000])
def test_damaged_weights_are_told(checkpoint: Path, size: int) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    assert_refused(checkpoint, "model.safetensors cannot be read: .* complete safetensors file")


def test_garbage_for_weights_is_told(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\xff" * 1000)

    assert_refused(checkpoint, "cannot be read")


@pytest.mark.parametrize(
    ("break_it", "count"),
    [
        (lambda d: change_weights(d, without("layers.1.mlp.up_proj")), 1),
        (lambda d: change_weights(d, lambda t: {f"other.{n}": w for n, w in t.items()}), 21),
        (lambda d: change_config(d, num_hidden_layers=3), 9),
        (lambda d: change_config(d, vocab_size=500), 2),
        (lambda d: change_config(d, num_key_value_heads=4), 4),
    ],
    ids=["a tensor missing", "all named otherwise", "a layer more", "more tokens", "more heads"],
)
def test_a_tensor_that_is_not_in_the_files_is_not_made_up(checkpoint, break_it, count):
    """transformers fills what is missing with random numbers and a warning, which is silenced: the
    model loaded and spoke nonsense."""
    break_it(checkpoint)

    assert_refused(checkpoint, f"lacks {count} of its model's tensors")


def test_a_tied_output_layer_is_not_missed(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    directory = save_checkpoint(tmp_path, model)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")

    module = load(directory).module

    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()


def test_a_tensor_too_many_is_no_trouble(checkpoint: Path) -> None:
    change_weights(checkpoint, lambda tensors: {**tensors, "extra": torch.zeros(3)})

    assert load(checkpoint).spec.model_type == "llama"


def test_tensors_that_no_part_of_the_model_takes_are_told(checkpoint: Path) -> None:
    """Weights of a larger model under a smaller one's configuration loaded without a word."""

    def with_a_layer_more(tensors: Tensors) -> Tensors:
        first = {k: v for k, v in tensors.items() if ".layers.0." in k}
        return {**tensors, **{k.replace(".0.", ".7.", 1): v.clone() for k, v in first.items()}}

    assert load(checkpoint).notes == ()
    change_weights(checkpoint, with_a_layer_more)

    [note] = load(checkpoint).notes

    assert "has 9 tensors its model does not use, model.layers.7." in note
    assert assemble(checkpoint, "auto").ready.notes == (note,)


def test_tensors_the_architecture_says_to_ignore_are_not_told(checkpoint: Path) -> None:
    """Old checkpoints carry buffers that are computed now."""
    change_weights(
        checkpoint,
        lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    )

    assert load(checkpoint).notes == ()


def test_a_missing_shard_is_told(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    names = list(load_file(path))
    path.rename(checkpoint / "model-00001-of-00002.safetensors")
    shards = {n: f"model-0000{1 + ('layers.1' in n)}-of-00002.safetensors" for n in names}
    index = {"metadata": {}, "weight_map": shards}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))

    assert_refused(checkpoint, "00002-of-00002.safetensors cannot be read: No such file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "zzz", "auto_map": {"AutoConfig": "c.C"}}, "custom code"),
        ({"model_type": "zzz"}, "zzz"),
        ({"model_type": ...}, "model_type"),
        ({"hidden_size": "abc"}, "hidden_size"),
        ({"num_attention_heads": 3}, "not a multiple"),
        ({"num_attention_heads": 0}, "modulo by zero"),
        ({"max_position_embeddings": "4k"}, "max_position_embeddings"),
    ],
    ids=str,
)
def test_a_configuration_transformers_refuses_is_told_with_its_reason(checkpoint, changes, message):
    """Values of the wrong type raise an error of their own kind, which once passed for a crash."""
    change_config(checkpoint, **changes)

    assert_refused(checkpoint, message, ModelUnsupported)


@pytest.mark.parametrize("content", ["{", "[]", "", "\x00"])
def test_a_damaged_configuration_is_told(checkpoint: Path, content: str) -> None:
    (checkpoint / "config.json").write_text(content)

    assert_refused(checkpoint, "config.json cannot be read: it is not ")


def test_code_in_a_checkpoint_of_a_known_kind_is_never_run(checkpoint: Path) -> None:
    change_config(checkpoint, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    trap = checkpoint / "modeling_evil.py"
    trap.write_text(f"open({str(checkpoint / 'ran')!r}, 'w')\nclass Evil: pass\n")

    assert type(load(checkpoint).module).__name__ == "LlamaForCausalLM"
    assert not (checkpoint / "ran").exists()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)],
)
@pytest.mark.parametrize("says_so", [True, False], ids=["config says", "config is silent"])
def test_the_dtype_is_the_checkpoints_unless_another_is_asked_for(
    checkpoint: Path, asked: str, expected: torch.dtype, says_so: bool
) -> None:
    change_weights(checkpoint, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    change_config(checkpoint, dtype="bfloat16" if says_so else ..., torch_dtype=...)

    loaded = load(checkpoint, asked)

    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}


def test_a_smaller_context_may_be_asked_for_and_a_larger_may_not(checkpoint: Path) -> None:
    assert load(checkpoint, limit=100).max_context == 100
    assert load(checkpoint, limit=10_000).max_context == 512


def test_loading_tells_how_far_it_is(checkpoint: Path) -> None:
    heard: list[LoadProgress] = []
    load_model(find_model(str(checkpoint)), ModelConfig(), None, heard.append)

    fractions = [e.fraction for e in heard if e.stage == "loading weights"]
    assert fractions[0] == 0.0
    assert fractions[-1] == 1.0
    assert heard[0].stage == "reading the model's configuration"


def test_loading_is_silent(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change_config(checkpoint, num_hidden_layers=1)  # leaves tensors over, which is worth a table
    load(checkpoint)

    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_checkpoint_is_inspected_by_the_headers_of_its_weights(checkpoint: Path) -> None:
    """The numbers behind them are not read: here, there are none."""
    path = checkpoint / "model.safetensors"
    size, header = path.stat().st_size, read_header(path).raw
    path.write_bytes(header)
    os.truncate(path, size)

    config, spec = inspect_model(find_model(str(checkpoint)))

    assert config.model_type == "llama"
    assert spec is not None
    assert spec.max_context == 512


@pytest.mark.parametrize(
    ("num_bytes", "is_asked_for", "sentence"),
    [
        (1000, True, "--device-cache allows 1000 B, less than the two blocks"),
        (1000, False, "Memory allows 1000 B, less than the two blocks"),
        (1 << 52, True, "--device-cache allows .*, more than there is"),
        (1 << 80, True, "--device-cache allows .*, more than there is"),
        (1 << 52, False, "There is no room for .* of KV"),
    ],
)
def test_a_cache_that_cannot_be_is_told_and_blames_no_flag_that_was_not_given(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
    is_asked_for: bool,
    sentence: str,
) -> None:
    """Memory that the system would not give came as a bare OSError."""
    if not is_asked_for:
        monkeypatch.setattr(kv_storage, "device_budget", lambda config, device: num_bytes)
    size = Size(num_bytes=num_bytes) if is_asked_for else None
    cache = CacheConfig(block_size=1024 if num_bytes > 1000 else 16, device_bytes=size)
    with pytest.raises(ModelError, match=sentence):
        assemble(checkpoint, "auto", cache)


def test_weights_that_memory_does_not_take_are_not_called_damaged(checkpoint, monkeypatch):
    """Under `ulimit -v` a whole file was suspected of being no complete download."""

    def refuse(*given: object, **named: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    with pytest.raises(ModelError, match="does not fit in memory"):
        load(checkpoint)
