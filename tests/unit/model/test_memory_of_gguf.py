"""What a GGUF file will need in memory is known before it is read."""

from pathlib import Path

import pytest
import torch

from kvchat.core.config import ModelConfig
from kvchat.model.checkpoint.source import find_model
from kvchat.model.checkpoint.tensors import memory_of_gguf, read_tensors
from kvchat.model.gguf.tensors import bits_of_formats
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.loader import inspect_model, load_model, memory_of_weights
from kvchat.model.packed.quantise import num_packed_bytes
from support.checkpoints import tiny_model
from support.gguf_files import write_gguf


@pytest.mark.parametrize("kind", ["Q6_K", "IQ2_XXS"])
def test_the_memory_told_is_the_memory_taken(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model = tiny_model("llama", **sizes, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", model, lambda n: "BF16" if "token_embd" in n else kind)
    source = find_model(str(path))
    config, spec = inspect_model(source)
    assert spec is not None
    assert source.gguf is not None

    told = memory_of_weights(source, config, spec, torch.device("cpu"))

    asked = ModelConfig(source.name, "cpu")
    module = load_model(source, asked, None, lambda event: None).module
    own = sum(part.nbytes for part in module.parameters())
    assert told == pytest.approx(own + num_packed_bytes(module), rel=0.01)
    each = {"Q6_K": "Q6_K 6.562", "IQ2_XXS": "IQ2_XXS 2.062"}[kind]
    assert each in bits_of_formats(source.gguf)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_head_that_multiplies_with_the_tables_blocks_counts_once(device, tmp_path):
    """On a GPU the table is there in 16 bits too: of SmolLM2 30 MB were not told."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, head_dim=64, tie_word_embeddings=True)
    source = find_model(str(write_gguf(tmp_path / "m.gguf", model, lambda name: "Q4_1")))
    config, _ = inspect_model(source)
    meta, blocks_on = MetaModel(config), torch.device(device)

    told = memory_of_gguf(source, meta, blocks_on, ())

    read = read_tensors(source, meta, torch.bfloat16, lambda progress: None, blocks_on)
    blocks = {id(block): block.num_bytes for parts in read.blocks.values() for block in parts}
    floats = [tensor for name, tensor in read.tensors.items() if name not in read.blocks]
    held = sum(tensor.nbytes for tensor in floats) + sum(blocks.values())
    assert "lm_head.weight" in read.blocks
    assert told == pytest.approx(held, rel=0.01)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell")
def test_pages_of_a_file_that_were_copied_are_given_back(tmp_path: Path) -> None:
    """A file of 491 MB took 1,082 MB at most: its pages counted beside their copies."""
    sizes = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 2}
    model = tiny_model("llama", **sizes, head_dim=64)
    path = write_gguf(tmp_path / "m.gguf", model, lambda n: "BF16" if "token_embd" in n else "Q6_K")

    loaded = load_model(
        find_model(str(path)), ModelConfig(str(path), "cpu", "bfloat16"), None, lambda event: None
    )

    table = loaded.module.get_input_embeddings().weight
    assert table.nbytes < path.stat().st_size / 4
    assert 0 < _resident_bytes(path) < path.stat().st_size / 2


def _resident_bytes(path: Path) -> int:
    """Return how much of a file this process has mapped that is in its memory."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total
