"""What a package manager and readers of the first page rely on: declarations, pins, figures."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_floors import ROOT, SOURCES, TESTS, imported_modules, tree_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Packages of ours, and modules that lie beside a test.
OURS = {"kvchat", "kvchat_kernels", "demo_recipe", *(path.stem for path in TESTS)}
OURS |= {path.name for path in ROOT.glob("tests/*")}
# A CUDA build of torch asks for exact versions of these by itself.
PINNED_BY_TORCH = ("nvidia-", "cuda-")


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
    package_of = packages_distributions() | {"flashinfer": ["flashinfer-python"]}
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
    declared = names_of([*PROJECT["dependencies"], *EXTRAS["flashinfer"]])
    assert undeclared(SOURCES, declared) == []
    assert undeclared(TESTS, declared | names_of(EXTRAS["dev"])) == []


def subclassed(path: Path) -> set[str]:
    """Return the packages of which a file extends classes."""
    tree = tree_of(path)
    package_of = {
        alias.asname or alias.name.split(".")[0]: (getattr(node, "module", 0) or alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    names = {
        name.id
        for node in ast.walk(tree)
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


def test_every_declared_package_and_all_it_needs_is_pinned() -> None:
    """An installation of the checkout next year is the one that was tested."""
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if line[:1] != "#"}
    needed: set[str] = set()
    pending = names_of([*PROJECT["dependencies"], *EXTRAS["dev"]])
    while pending:
        needed.add(name := pending.pop())
        try:
            pending |= names_of(requires(name) or ()) - needed
        except PackageNotFoundError:  # of another extra, or not for this machine
            continue
    assert sorted(name for name in needed - pinned if not name.startswith(PINNED_BY_TORCH)) == []


def test_links_of_the_documents_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert links == []


def test_the_first_page_is_short_and_its_figures_stand_in_the_benchmarks() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110

    measured = "".join(page.read_text() for page in ROOT.glob("docs/benchmarks/*.md"))
    rows = re.findall(r"^\| .* \| (.*) \| (.*) \| [\d.]+ \|$", text, re.MULTILINE)
    figures = [figure for row in rows for side in row for figure in re.findall(r"[\d,.]*\d", side)]
    missing = [one for one in figures if not re.search(rf"(?<![\d.,]){re.escape(one)}\b", measured)]
    assert len(figures) > 20
    assert missing == []
