"""What the probe found out about models, for all processes of a run of tests.

Hundreds of tests load the same few tiny models, and a probe takes a third of such a load. The
first test that loads a model probes it; a model that is refused is probed each time. The results
are files of one run, in which neither kvchat nor transformers changes.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kvchat.core.types import Fact
from kvchat.model import loader
from kvchat.model.hf.config_limits import ParameterLimit
from kvchat.model.hf.known_specs import KnownSpecs
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.hf.probe import probe_meta
from kvchat.model.spec import ModelSpec

DIRECTORY_VARIABLE = "DIRECTORY_OF_TEST_RUN"


class _Files:
    """A memory of one kind of facts, with a file for each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, kind: str, key: str) -> Fact:
        try:
            return json.loads((self._directory / key).read_bytes())
        except OSError:
            return None

    def set(self, kind: str, key: str, fact: Fact) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self._directory, delete=False) as file:
            json.dump(fact, file)
        os.replace(file.name, self._directory / key)


def find_or_probe(model: MetaModel, limit: ParameterLimit) -> ModelSpec:
    """Return the spec of an equal model of this run, or probe; raises what `probe_meta` raises."""
    known = KnownSpecs(_Files(Path(os.environ[DIRECTORY_VARIABLE], "probes")))  # type: ignore[arg-type]
    key = _key(model.config, limit)
    spec = known.find(key)
    if spec is None:
        spec = probe_meta(model, limit)
        known.note(key, spec)
    return spec


def _key(config: Any, limit: ParameterLimit) -> str:
    content = json.loads(config.to_json_string(use_diff=False))
    content.pop("_name_or_path", None)
    facts = (type(config).__qualname__, content, repr(limit))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def use() -> None:
    """Have this process, and its forks, probe each model once."""
    loader.probe_meta = find_or_probe  # type: ignore[assignment]
