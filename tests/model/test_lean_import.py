"""Importing transformers without torch's compiler, beside the plain import.

Each case is a process of its own, because modules are imported once.
"""

import os
import subprocess
import sys
from pathlib import Path

from support.checkpoints import save_checkpoint, tiny_model

_REPOSITORY = Path(__file__).resolve().parents[2]

_LEAN = "from kvchat.model.lean_import import import_transformers\nimport_transformers()\n"
_LOGITS = """
import sys, torch
from pathlib import Path
from kvchat.core.config import ModelConfig
from kvchat.model.loader import load_model
from kvchat.model.source import find_model
source = find_model({path!r})
module = load_model(source, ModelConfig(source.name, "cpu"), None, lambda event: None).module
module.set_attn_implementation("eager")
with torch.inference_mode():
    print(module(torch.arange(9)[None]).logits.double().sum().item())
"""


def _printed(program: str) -> list[str]:
    paths = os.pathsep.join(str(_REPOSITORY / name) for name in ("", "kernels", "tests"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_loads_without_the_compiler_and_computes_the_same(tmp_path: Path) -> None:
    path = str(save_checkpoint(tmp_path, tiny_model("llama")))
    told = "print([m for m in ('torch._inductor', 'torch.distributed.tensor') if m in sys.modules])"

    plain = _printed(_LOGITS.format(path=path) + told)
    lean = _printed(_LEAN + _LOGITS.format(path=path) + told)

    assert plain[0] == lean[0]
    assert plain[1] == "['torch._inductor', 'torch.distributed.tensor']", "else it is not needed"
    assert lean[1] == "[]"


def test_what_needs_the_compiler_gets_it() -> None:
    program = """
import torch
was = torch.distributed.is_available()
compiled = torch.compile(lambda x: 2 * x, backend="eager")
print(compiled(torch.ones(1)).item(), was, "torch._inductor" in __import__("sys").modules)
import torch._dynamo.utils
print(torch._dynamo.disable is __import__("sys").modules["torch._dynamo"].disable)
"""
    assert _printed(_LEAN + program) == ["2.0 True True", "True"]


def test_what_the_stand_in_lacks_costs_the_plain_import_only() -> None:
    """As with another version of transformers or torch, of three marks one after another.

    torch is imported once: each case is a fork of that process.
    """
    program = """
import os, sys, torch
from kvchat.model import lean_import
def refuses(self, function=None, *_, **__):
    raise TypeError
for lacking in ("disable", "allow_in_graph", "assume_constant_result"):
    if os.fork() == 0:
        setattr(lean_import._StandIn, lacking, refuses)
        lean_import.import_transformers()
        import transformers
        kind = type(sys.modules["torch._dynamo"]).__name__
        print(lacking, kind, transformers.modeling_utils.__name__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    lacking = ("disable", "allow_in_graph", "assume_constant_result")
    assert _printed(program) == [f"{name} module transformers.modeling_utils" for name in lacking]
