"""What a package manager and readers of the first page rely on: declarations, pins, figures."""

import re
from importlib.metadata import PackageNotFoundError, requires

from packaging.utils import canonicalize_name

from contract.test_floors import EXTRAS, PROJECT, ROOT, names_of

# A CUDA build of torch asks for exact versions of these by itself.
PINNED_BY_TORCH = ("nvidia-", "cuda-")


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
