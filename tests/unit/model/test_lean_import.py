"""Importing torch and transformers without what an answer does not need, beside the plain import.

Each case is a process of its own, because modules are imported once: a fork of a process that has
imported what the cases begin with.
"""

import ast
import functools
import json
import sys
from collections.abc import Iterator

import pytest

from support.checkpoints import save_checkpoint, tiny_model
from support.matrix import spread
from support.other_process import run_python, start_python

_LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_READ_BY_LIBRARIES = (
    *("GOMP_SPINCOUNT", "TOKENIZERS_PARALLELISM", "LRU_CACHE_CAPACITY"),
    _LARGE_PAGES,
)
_LEAN = "from kvchat.model.hf.lean_import import import_transformers\nimport_transformers()\n"
_LOGITS = """
import sys, torch
from pathlib import Path
from kvchat.cache.disk.memory import DiskMemory
from kvchat.core.config import ModelConfig
from kvchat.model.loader import load_model
from kvchat.model.checkpoint.source import find_model
source = find_model({path!r})
known = DiskMemory(Path({path!r}) / "state")
module = load_model(source, ModelConfig(source.name, "cpu"), None, lambda event: None, known).module
module.set_attn_implementation("eager")
with torch.inference_mode():
    print(module(torch.arange(9)[None]).logits.double().sum().item())
"""


_FORKS = """
import json, os, sys
exec(sys.argv[1], {})
for line in sys.stdin:
    if os.fork() == 0:
        exec(json.loads(line), {})
        os._exit(0)
    print("ended", os.wait()[1])
"""


class Forks:
    """A Python that has run the beginning of all programs; each program is a fork of it."""

    def __init__(self, beginning: str) -> None:
        self._process = start_python(_FORKS, beginning)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def printed(self, program: str) -> list[str]:
        """Run a program to its end; return the lines that it printed."""
        self._to.write(json.dumps(program) + "\n")
        self._to.flush()
        lines = []
        while not (line := self._from.readline()).startswith("ended "):
            assert line, "the process is gone"
            lines.append(line.removesuffix("\n"))
        assert line == "ended 0\n"
        return lines

    def close(self) -> None:
        self._to.close()
        self._from.close()
        assert self._process.wait(60.0) == 0


@pytest.fixture(scope="module")
def lean() -> Iterator[Forks]:
    forks = Forks(_LEAN)
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Forks]:
    forks = Forks("import torch, transformers.modeling_utils")
    yield forks
    forks.close()


_HEAVY = ("torch._inductor", "torch.distributed.tensor", "torch._refs", "torch._prims", "sympy")


def test_a_model_loads_with_less_of_torch_and_computes_the_same(lean, plain, tmp_path):
    """The first lean start probes the model; its table of tokens once needed sympy for that."""
    path = str(save_checkpoint(tmp_path, tiny_model("llama")))
    told = f"print([m for m in {_HEAVY} if m in sys.modules])"

    whole = plain.printed(_LOGITS.format(path=path).replace('"state"', '"other"') + told)
    first = lean.printed(_LOGITS.format(path=path) + told)
    second = lean.printed(_LOGITS.format(path=path) + told)

    assert whole[0] == first[0] == second[0]
    assert whole[1] == str(list(_HEAVY)), "else they are not needed"
    assert first[1] == second[1] == "[]"


def test_a_name_that_was_not_read_is_found_when_it_is_asked_for(lean: Forks, plain: Forks) -> None:
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
    some, all_names = lean.printed(program), plain.printed(program)

    assert [some[0], all_names[0]] == ["True", "False"]
    assert some[1:] == all_names[1:]


def test_an_operator_without_memory_is_imported_when_a_model_uses_it(lean: Forks) -> None:
    program = """
import sys, torch
from kvchat.model.hf.lean_import import import_meta_operators
from kvchat.model.hf.model_class import on_meta, operators_on_meta
with on_meta():
    tokens, table = torch.nn.Embedding(9, 4), 1 / (torch.arange(0, 4, 2.0) + 1)
    layer = torch.nn.Conv1d(4, 4, 3)
    found = tokens(torch.zeros(2, 3, dtype=torch.long))
print(table.shape, found.shape, found.dtype, {table.device, found.device})
x = torch.empty(1, 4, 9, device="meta")
try:
    layer(x)
except NotImplementedError:
    print("not there", "torch._refs" in sys.modules)
with operators_on_meta():
    print(layer(x).shape)
print("torch._refs" in sys.modules, import_meta_operators(), torch.Generator().initial_seed())
"""
    assert lean.printed(program) == [
        "torch.Size([2]) torch.Size([2, 3, 4]) torch.float32 {device(type='meta')}",
        "not there False",
        "torch.Size([1, 4, 7])",
        "True False 67280421310721",
    ]


def test_what_needs_the_compiler_gets_it(lean: Forks) -> None:
    program = """
import torch
was = torch.distributed.is_available()
compiled = torch.compile(lambda x: 2 * x, backend="eager")
print(compiled(torch.ones(1)).item(), was, "torch._inductor" in __import__("sys").modules)
import torch._dynamo.utils
print(torch._dynamo.disable is __import__("sys").modules["torch._dynamo"].disable)
"""
    assert lean.printed(program) == ["2.0 True True", "True"]


def test_marking_a_state_needs_no_compiler(lean: Forks) -> None:
    """Each start of a model with recurrent state once imported it, for a second or two."""
    program = """
import sys, torch
print(torch._dynamo.mark_static_address(torch.ones(1)), type(sys.modules["torch._dynamo"]).__name__)
"""
    assert lean.printed(program) == ["None _StandIn"]


@functools.cache
def in_a_new_process(large_pages: str | None) -> list[str]:
    """Load torch's library ahead, and torch and transformers, as `kvchat` does; return the lines
    that say what torch computes and which variables libraries and other programs have."""
    variables = {} if large_pages is None else {_LARGE_PAGES: large_pages}
    program = f"""
import ctypes, os, sys
from pathlib import Path
from kvchat.cli.main import set_library_environment
from kvchat.model.hf import lean_import
for name in {_READ_BY_LIBRARIES}:
    if name not in {[*variables]}:
        os.environ.pop(name, None)
set_library_environment()
lean_import.load_library()
print("torch" in sys.modules, "libtorch_cpu" in Path("/proc/self/maps").read_text())
lean_import.import_transformers()
lean_import.load_library()
import torch
print((torch.arange(6.0).view(2, 3) @ torch.ones(3, 1)).tolist(), torch.get_num_threads() > 0)
from kvchat.model.device import limit_kept_shapes
limit_kept_shapes()
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print([getenv(name.encode()).decode() for name in {_READ_BY_LIBRARIES}])
print([os.environ.get(name) for name in {_READ_BY_LIBRARIES}])
"""
    return run_python(program, **variables).splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at what Linux has loaded")
def test_torch_is_the_same_with_its_library_loaded_ahead() -> None:
    assert in_a_new_process(None)[:2] == ["False True", "[[3.0], [12.0]] True"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at what Linux has loaded")
@pytest.mark.parametrize(("given", "read"), spread([(None, "1"), ("0", "0")], [(None, "1")]))
def test_what_libraries_alone_read_is_not_left_to_other_programs(given, read):
    """Tools, editors and clients that kvchat starts had variables that the user had not set."""
    for_libraries, for_others = map(ast.literal_eval, in_a_new_process(given)[2:])
    assert for_libraries == ["3000", "false", "64", read]
    assert for_others == [None, None, None, given]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_search_for_garbage_goes_on_after_an_import(was_enabled: bool) -> None:
    """Also after one that failed; and where it was off it stays off."""
    program = f"""
import gc
from kvchat.model.hf.lean_import import without_collection
gc.enable() if {was_enabled} else gc.disable()
try:
    with without_collection():
        print(gc.isenabled())
        raise ImportError
except ImportError:
    print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""
    assert run_python(program).splitlines() == ["False", f"{was_enabled} {was_enabled}"]


def test_a_model_that_is_replaced_is_found_as_garbage() -> None:
    """Each load froze all that was there: after /model the old model's memory was never freed."""
    program = """
import gc, weakref
from kvchat.model.hf.lean_import import without_collection
with without_collection():
    pass
class Model: pass
old = Model()
old.forward = old  # as modules have parts that know them
seen = weakref.ref(old)
with without_collection():
    pass
del old
gc.collect()
print(seen())
"""
    assert run_python(program).strip() == "None"


@pytest.mark.parametrize("lacking", spread(["disable", "allow_in_graph", "assume_constant_result"]))
def test_what_the_stand_in_lacks_costs_the_plain_import_only(lacking: str) -> None:
    """As with another version of transformers or torch, of three marks one after another."""
    program = f"""
import sys
from kvchat.model.hf import lean_import
def refuses(self, function=None, *_, **__):
    raise TypeError
setattr(lean_import._StandIn, {lacking!r}, refuses)
lean_import.import_transformers()
import transformers
print(type(sys.modules["torch._dynamo"]).__name__, transformers.modeling_utils.__name__)
"""
    assert run_python(program).split() == ["module", "transformers.modeling_utils"]
