"""Checks the architecture: which package may import which, and which owns or declares a library.

Reads the sources only. Lazy and typing-only imports count too, so every cycle is found. A check
goes over all files in one test, and names every file that is wrong.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("kvchat/**/*.py"), *ROOT.glob("kernels/**/*.py")])
TESTS = sorted(ROOT.glob("tests/**/*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Packages of ours, and modules that lie beside a test.
OURS = {"kvchat", "kvchat_kernels", "demo_recipe", *(path.stem for path in TESTS)}
OURS |= {path.name for path in ROOT.glob("tests/*")}

# What each first-party package may import, beside itself.
ALLOWED = {
    "core": set(),
    "kvchat_kernels": set(),
    "cache": {"core", "kvchat_kernels"},
    "model": {"core", "kvchat_kernels"},
    "engine": {"core", "kvchat_kernels", "cache", "model"},
    "remote": {"core", "engine"},
    "chat": {"core", "cache", "model", "engine", "remote"},
    "tools": {"core", "chat"},
    "terminal": {"core", "cache", "chat", "tools"},
    "server": {"core", "chat"},
    "bench": {"core", "kvchat_kernels", "cache", "model", "engine", "chat"},
    "demo": set(),
    "cli": {"core", "kvchat_kernels", "cache", "model", "engine", "remote", "chat", "tools"}
    | {"terminal", "server", "bench"},
}
# What each package of kvchat/model may import of the others. All may import the modules of `BASE`.
ALLOWED_IN_MODEL = {
    "files": set(),
    "gguf": {"files"},
    "hf": {"files"},
    "packed": {"hf"},
    "checkpoint": {"files", "gguf", "hf", "packed"},
    "decoder": {"hf", "packed"},
    "cpu": {"decoder", "packed"},
    "gpu": {"decoder", "hf", "packed", "loader", "paged_model"},
}
BASE = {"batch", "device", "spec", "state"}
# Who may import a library; a path names a single file.
OWNERS = {
    "torch": {"kvchat_kernels", "cache", "model", "engine", "bench", "cli/doctor.py"}
    | {"cli/models.py"},
    "triton": {"kvchat_kernels"},
    "llvmlite": {"kvchat_kernels"},
    "transformers": {"model", "bench"},
    "huggingface_hub": {"model"},
    "safetensors": {"model", "bench/peers.py"},
    # A GGUF file has a vocabulary in place of tokenizer.json, which the chat floor reads.
    "tokenizers": {"chat", "model/gguf/tokenizer.py", "model/files/sentencepiece_file.py"}
    | {"model/rounding.py", "model/files/text_settings.py"},
    "gguf": {"model"},
    "regex": {"model/files/adapter.py"},
    "jinja2": {"chat"},
    "llguidance": {"chat/grammar.py"},
    "diskcache": {"cache/disk/json_disk.py", "cache/disk/memory.py"},
    "xxhash": {"cache"},
    "zstandard": {"cache/disk/pack_code.py"},
    "cryptography": {"cache/shared/team_key.py"},
    "valkey": {"cache/shared/valkey_store.py"},
    "obstore": {"cache/shared/object_store.py"},
    "mooncake": {"cache/shared/mooncake_store.py"},
    "rich": {"terminal"},
    "pygments": {"terminal", "chat"},
    "markdown_it": {"chat/html_text.py"},
    "prompt_toolkit": {"terminal"},
    "typer": {"cli"},
    "platformdirs": {"cli"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "websockets": {"server"},
    "mcp": {"tools/mcp_tools.py"},
    "httpx2": {"remote", "tools/mcp_tools.py", "bench/clients.py"},
}
# Modules that import each other, for types only, as docs/architecture.md names them.
CIRCLES = {frozenset({"kvchat.terminal.prompt", "kvchat.terminal.keys", "kvchat.terminal.layout"})}
REFUSED_NAMES = {"utils", "common", "helpers", "misc"}


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "kvchat_kernels" if parts[0] == "kernels" else parts[1].removesuffix(".py")


def name_in_package(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[1:])


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements_of(parent: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements in another, handlers and cases too: many fewer than there are nodes."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(parent, name, ())
        for child in children if isinstance(children, list) else ():
            yield child
            yield from statements_of(child)


@cache
def imported_modules(path: Path) -> tuple[tuple[int, str], ...]:
    """Return the line and the full name of everything a file imports."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in statements_of(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "kernels" else parts).removesuffix(".__init__")


def reached_from(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Return the modules that `start` imports, and those that these import, and so on."""
    reached: set[str] = set()
    pending = [start]
    while pending:
        new = imports[pending.pop()] - reached
        reached |= new
        pending += new
    return reached


def first_party(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] == "kvchat_kernels":
        return "kvchat_kernels"
    if parts[0] == "kvchat" and len(parts) > 1 and parts[1] in ALLOWED:
        return parts[1]
    return None


def wrong_imports(path: Path) -> Iterator[str]:
    """Yield what a file imports against the rules."""
    package, name = package_of(path), name_in_package(path)
    for line, module in imported_modules(path):
        target = first_party(module)
        if target and package in ALLOWED and target not in ALLOWED[package] | {package}:
            yield f"{path}:{line}: {package} imports {module}"
        library = module.split(".")[0]
        if library in OWNERS and not OWNERS[library] & {package, name}:
            yield f"{path}:{line}: {library} is not {name}'s to import"
        if package == "core" and library not in sys.stdlib_module_names | {"kvchat"}:
            yield f"{path}:{line}: core imports {library}"


def wrong_imports_in_model(path: Path) -> Iterator[str]:
    """Yield what a file of a package of kvchat/model imports against the rules."""
    package = path.parent.name
    for line, module in imported_modules(path):
        target = module.removeprefix("kvchat.model.").split(".")[0]
        allowed = ALLOWED_IN_MODEL[package] | BASE | {package}
        if module.startswith("kvchat.model.") and target not in allowed:
            yield f"{path}:{line}: model/{package} imports {module}"


def test_imports_go_down_in_model_too() -> None:
    files = [path for path in SOURCES if path.parent.parent == ROOT / "kvchat" / "model"]
    wrong = [line for path in files for line in wrong_imports_in_model(path)]

    assert {path.parent.name for path in files} == set(ALLOWED_IN_MODEL)
    assert not wrong, "\n".join(wrong)


def test_imports_go_down_and_libraries_have_owners() -> None:
    wrong = [line for path in SOURCES for line in wrong_imports(path)]

    assert len(SOURCES) > 300
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_but_for_the_circles_that_are_named() -> None:
    imports: dict[str, set[str]] = {module_name(path): set() for path in SOURCES}
    for path in SOURCES:
        for _, name in imported_modules(path):
            found = name if name in imports else name.rpartition(".")[0]
            imports[module_name(path)] |= {found} & imports.keys() - {module_name(path)}
    reached = {name: reached_from(name, imports) for name in imports}
    circles = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in imports
        if name in reached[name]
    }
    assert circles == CIRCLES


def test_a_file_introduces_itself_and_has_a_telling_name() -> None:
    files = [*SOURCES, *TESTS]

    assert not [path for path in files if not path.read_text().startswith(('"""', 'r"""'))]
    assert not [path for path in files if path.stem in REFUSED_NAMES]


def test_the_recipe_of_the_demo_pair_is_not_part_of_the_product() -> None:
    for path in [*SOURCES, *TESTS]:
        imported = {module.split(".")[0] for _, module in imported_modules(path)}
        assert "demo_recipe" not in imported, path


def names_of(requirements: Iterable[str]) -> set[str]:
    """Return the packages that requirements name, where their markers hold here."""
    parsed = [Requirement(text) for text in requirements]
    return {
        canonicalize_name(one.name)
        for one in parsed
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }


def undeclared(files: Iterable[Path], declared: set[str]) -> list[str]:
    """Return the imports of other packages that no declaration has."""
    package_of = packages_distributions() | {"mooncake": ["mooncake-transfer-engine-non-cuda"]}
    known = sys.stdlib_module_names | OURS
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in files
        for line, module in imported_modules(path)
        if (top := module.split(".")[0]) not in known
        and not declared & {canonicalize_name(name) for name in package_of.get(top, ())}
    ]


def test_every_imported_package_is_declared() -> None:
    """A package that only another one brings is gone when that one drops it."""
    optional = [*EXTRAS["shared"], *EXTRAS["mooncake"]]
    declared = names_of([*PROJECT["dependencies"], *optional])
    assert undeclared(SOURCES, declared) == []
    assert undeclared(TESTS, declared | names_of(EXTRAS["dev"])) == []


def subclassed(path: Path) -> set[str]:
    """Return the packages of which a file extends classes."""
    nodes = list(statements_of(tree_of(path)))
    package_of = {
        alias.asname or alias.name.split(".")[0]: (getattr(node, "module", 0) or alias.name)
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    names = {
        name.id
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        for name in ast.walk(base)
        if isinstance(name, ast.Name)
    }
    return {package_of[name].split(".")[0] for name in names & set(package_of)}


def test_a_package_whose_classes_we_extend_has_an_upper_bound() -> None:
    """No library documents which methods a class calls of itself: the next version may not."""
    extended = set().union(*(subclassed(path) for path in SOURCES))
    packages = packages_distributions()
    unbounded = {
        canonicalize_name(one.name)
        for one in map(Requirement, PROJECT["dependencies"])
        if "<" not in str(one.specifier)
    }
    assert {"uvicorn", "typer", "prompt_toolkit", "diskcache"} <= extended
    assert (
        unbounded & {canonicalize_name(n) for top in extended for n in packages.get(top, ())}
        == set()
    )


def test_kernels_is_a_source_root_and_no_package() -> None:
    """A top-level package named kernels breaks transformers for those who have Hugging Face's."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "kernels").glob("*.py"))


def test_every_package_is_on_a_floor() -> None:
    packages = {path.parent.name for path in ROOT.glob("kvchat/*/__init__.py")}

    assert packages == set(ALLOWED) - {"kvchat_kernels"}


def foreign_code(path: Path) -> Iterator[str]:
    """Yield what a file unpickles, or runs that is not its own."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for name in {alias.name for alias in node.names} & {"pickle", "dill", "marshal"}:
                yield f"{path}:{node.lineno} imports {name}"
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in {"eval", "exec", "load", "system"}:
                called = ast.unparse(node.func)
                if called in {"eval", "exec", "torch.load", "os.system"}:
                    yield f"{path}:{node.lineno} calls {called}"
            for keyword in node.keywords:
                allowed = {"trust_remote_code": "False", "shell": "False"}.get(keyword.arg or "")
                if allowed is not None and ast.unparse(keyword.value) != allowed:
                    yield f"{path}:{node.lineno} gives {ast.unparse(keyword)}"


def test_nothing_is_unpickled_and_no_foreign_code_is_run() -> None:
    found = [line for path in SOURCES for line in foreign_code(path)]

    assert not found, "\n".join(found)


def swallowed_errors(path: Path) -> Iterator[str]:
    """Yield the handlers of every error that neither raise again, nor log, nor hand it on."""
    for node in statements_of(tree_of(path)):
        if not isinstance(node, ast.ExceptHandler) or node.type is None:
            continue
        if ast.unparse(node.type) not in {"Exception", "BaseException"}:
            continue
        parts = [part for statement in node.body for part in ast.walk(statement)]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        is_raised = any(isinstance(part, ast.Raise) for part in parts)
        if not is_raised and not names & {"_log", node.name}:
            yield f"{path}:{node.lineno} swallows errors"


def test_no_error_is_swallowed() -> None:
    found = [line for path in SOURCES for line in swallowed_errors(path)]

    assert not found, "\n".join(found)


def test_a_file_that_breaks_the_rules_is_named_with_what_it_does(tmp_path: Path) -> None:
    """Else a check that finds nothing could be one that looks at nothing."""
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import pickle\nload(x, trust_remote_code=True)\neval(y)\n"
        "try:\n    run()\nexcept Exception:\n    pass\n"
    )

    found = [line.split(":", 1)[1] for line in (*foreign_code(bad), *swallowed_errors(bad))]

    assert sorted(found) == [
        "1 imports pickle",
        "2 gives trust_remote_code=True",
        "3 calls eval",
        "6 swallows errors",
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "import sys; sys.argv = ['kvchat', '--help']; import kvchat.cli.app",
        "import kvchat.chat.host, kvchat.engine.thread",
        "import kvchat.terminal.repl",
    ],
    ids=["help", "chat", "terminal"],
)
def test_what_must_start_fast_loads_neither_torch_nor_transformers(statement: str) -> None:
    check = f"{statement}; import sys; print('torch' in sys.modules, 'transformers' in sys.modules)"
    path = [str(ROOT), str(ROOT / "kernels")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; {check}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]


def loaded_with(imports: str, modules: set[str]) -> str:
    """Return the list of those modules that a process has loaded after these imports."""
    path = [str(ROOT), str(ROOT / "kernels")]
    script = (
        f"import sys; sys.path[:0] = {path}; import {imports}; "
        f"print(sorted({modules} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_chat_needs_no_terminal() -> None:
    """A server is one more front end: all of the chat floor loads without the floors above it."""
    modules = sorted(path.stem for path in (ROOT / "kvchat" / "chat").glob("[a-z]*.py"))
    assert {"controller", "host", "json_requests", "turn_loop"} <= set(modules)
    above = {"kvchat.terminal", "kvchat.cli", "rich", "prompt_toolkit", "typer"}

    assert loaded_with(", ".join(f"kvchat.chat.{name}" for name in modules), above) == "[]"


def test_one_prompt_of_a_script_loads_nothing_that_draws() -> None:
    """`kvchat -p` begins to load its model only after these imports."""
    above = {"rich.console", "pygments", "prompt_toolkit"}
    assert loaded_with("kvchat.cli.script", above) == "[]"
