"""Importing torch and transformers without what an answer does not need, beside the plain import.

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
state = Path({path!r}) / "state"
module = load_model(source, ModelConfig(source.name, "cpu"), None, lambda event: None, state).module
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


_HEAVY = ("torch._inductor", "torch.distributed.tensor", "torch._refs", "torch._prims", "sympy")


def test_a_model_loads_with_less_of_torch_and_computes_the_same(tmp_path: Path) -> None:
    """The first lean start probes the model, which needs some of it; the second knows the result.

    So it imports less than `import torch, transformers` alone.
    """
    path = str(save_checkpoint(tmp_path, tiny_model("llama")))
    told = f"print([m for m in {_HEAVY} if m in sys.modules])"

    plain = _printed(_LOGITS.format(path=path).replace('"state"', '"other"') + told)
    first = _printed(_LEAN + _LOGITS.format(path=path) + told)
    second = _printed(_LEAN + _LOGITS.format(path=path) + told)

    assert plain[0] == first[0] == second[0]
    assert plain[1] == str(list(_HEAVY)), "else they are not needed"
    assert first[1] == str(list(_HEAVY[2:]))
    assert second[1] == "[]"


def test_a_name_that_was_not_read_is_found_when_it_is_asked_for() -> None:
    """transformers has no BertTokenizerFast of its own, and searches others for it."""
    program = """
import transformers
print(len(transformers.__all__) < 1000)
from transformers import BertTokenizerFast, LlamaForCausalLM
from transformers.models import Qwen2Config
print(BertTokenizerFast.__name__, LlamaForCausalLM.__name__, Qwen2Config.__name__)
print(hasattr(transformers, "Unheard"), transformers.models.llama.__name__)
print(sorted(set(transformers.__all__)), len(set(transformers.models.__all__)))
"""
    lean, plain = _printed(_LEAN + program), _printed(program)

    assert [lean[0], plain[0]] == ["True", "False"]
    assert lean[1:] == plain[1:]


def test_an_operator_without_memory_is_imported_when_a_model_uses_it() -> None:
    program = """
import sys, torch
from kvchat.model.lean_import import import_meta_operators
from kvchat.model.model_class import on_meta, operators_on_meta
with on_meta():
    layer, table = torch.nn.Embedding(9, 4), 1 / (torch.arange(0, 4, 2.0) + 1)
print(table.shape, table.device, "torch._refs" in sys.modules)
try:
    layer(torch.zeros(1, dtype=torch.long, device="meta"))
except NotImplementedError:
    print("not there")
with operators_on_meta():
    print(layer(torch.zeros(1, dtype=torch.long, device="meta")).shape)
print("torch._refs" in sys.modules, import_meta_operators(), torch.Generator().initial_seed())
"""
    assert _printed(_LEAN + program) == [
        "torch.Size([2]) meta False",
        "not there",
        "torch.Size([1, 4])",
        "True False 67280421310721",
    ]


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
