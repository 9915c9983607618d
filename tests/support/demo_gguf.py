"""The shipped demo model as GGUF files in several block formats, to measure their perplexity.

python -m support.demo_gguf DIRECTORY      write demo-Q8_0.gguf and others
kvchat bench weights -m demo --sessions sessions --gguf DIRECTORY/demo-Q8_0.gguf

The files hold the demo's weights and no tokenizer of its: the benchmark gives them its tokens.
"""

import sys
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from support.gguf_files import write_gguf

KINDS = ("BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def write_demo(directory: Path, kind: str) -> Path:
    """Write the demo model with its matrices in a block format; return the file."""
    checkpoint = str(resources.files("kvchat.demo") / "target")
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        return write_gguf(directory / f"demo-{kind}.gguf", model, kind)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for name in KINDS:
        sys.stdout.write(f"{write_demo(place, name)}\n")
