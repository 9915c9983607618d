"""Specimens are made once for all tests of a run."""

from collections.abc import Callable

import pytest

from support.specimens import Specimen, make_specimen


@pytest.fixture(scope="session")
def specimen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Specimen]:
    """Return the specimen of a name in `architectures.SUPPORTED`, made on first use."""
    made: dict[str, Specimen] = {}

    def get(name: str) -> Specimen:
        if name not in made:
            made[name] = make_specimen(name, tmp_path_factory.mktemp("specimen"))
        return made[name]

    return get
