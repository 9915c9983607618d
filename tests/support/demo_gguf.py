"""The shipped demo model as GGUF files in several block formats, to measure them.

python -m support.demo_gguf DIRECTORY      write demo-Q8_0.gguf and others
kvchat bench weights -m demo --sessions sessions --gguf DIRECTORY/demo-Q8_0.gguf
kvchat bench clients -m DIRECTORY/demo-Q8_0.gguf --gguf DIRECTORY/demo-Q8_0.gguf

The files hold the demo's tokenizer too; llama.cpp splits numbers in another way. The benchmarks
give them its tokens.
"""

import json
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from support.gguf_files import write_gguf

KINDS = ("BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
_CHECKPOINT = Path(str(resources.files("kvchat.demo") / "target"))
_PLAIN, _CONTROL = 1, 3


def write_demo(directory: Path, kind: str) -> Path:
    """Write the demo model with its matrices in a block format, its tokenizer and its chat
    template; return the file.
    """
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(_CHECKPOINT, dtype=torch.float32)
        file = directory / f"demo-{kind}.gguf"
        return write_gguf(file, model, kind, write_tokenizer=_write_tokenizer)


def write_demo_to_chat_with(directory: Path) -> Path:
    """Write the demo model as it is."""
    return write_demo(directory, "F32")


def _write_tokenizer(writer: Any) -> None:
    written = json.loads((_CHECKPOINT / "tokenizer.json").read_text())
    control = {token["id"] for token in written["added_tokens"]}
    ids = written["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types([_CONTROL if i in control else _PLAIN for i in range(len(ids))])
    writer.add_token_merges([" ".join(pair) for pair in written["model"]["merges"]])
    writer.add_bos_token_id(ids["<|bos|>"])
    writer.add_eos_token_id(ids["<|end|>"])
    writer.add_chat_template((_CHECKPOINT / "chat_template.jinja").read_text())


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    for name in KINDS:
        sys.stdout.write(f"{write_demo(place, name)}\n")
