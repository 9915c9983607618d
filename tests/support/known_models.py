"""What is found out about models, for all processes of a run of tests.

Hundreds of tests load the same few tiny models, and a probe takes a third of such a load, the
self-test another. The first test that loads a model probes and tests it; a model that fails does so
each time. The results are files of one run, in which neither kvchat nor transformers changes.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvchat.core.types import Fact, Memory
from kvchat.engine import assembly
from kvchat.model import loader
from kvchat.model.hf.config_limits import ParameterLimit
from kvchat.model.hf.known_specs import KnownSpecs
from kvchat.model.hf.model_class import MetaModel
from kvchat.model.hf.probe import probe_meta
from kvchat.model.loader import LoadedModel
from kvchat.model.self_test import ensure_trusted
from kvchat.model.spec import ModelSpec

DIRECTORY_VARIABLE = "DIRECTORY_OF_TEST_RUN"
# A fork has the environment that its test gives it: without the variable its load failed.
_DIRECTORY = Path(os.environ[DIRECTORY_VARIABLE], "known")


class _Files:
    """A memory of one kind of facts, with a file for each."""

    def __init__(self) -> None:
        self._directory = _DIRECTORY

    def get(self, kind: str, key: str) -> Fact:
        try:
            return json.loads((self._directory / key).read_bytes())
        except OSError:
            return None

    def set(self, kind: str, key: str, fact: Fact) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self._directory, delete=False) as file:
            json.dump(fact, file)
        os.replace(file.name, self._directory / key)


class _SharedVerdicts:
    """A test's own memory, and what a self-test said of a model with the same files elsewhere.

    It is shared only where no part of the model was abandoned.
    """

    def __init__(self, own: Memory, identity: str) -> None:
        self._own, self._identity, self._files = own, identity, _Files()

    def get(self, kind: str, key: str) -> Fact:
        fact = self._own.get(kind, key)
        if fact is None and (fact := self._files.get(kind, f"{key}-{self._identity}")) is not None:
            self._own.set(kind, key, fact)
        return fact

    def set(self, kind: str, key: str, fact: Fact) -> None:
        self._own.set(kind, key, fact)
        if fact == "passes":
            self._files.set(kind, f"{key}-{self._identity}", fact)

    def update(self, kind: str, key: str, change: Callable[[Fact], Fact]) -> None:
        self.set(kind, key, change(self.get(kind, key)))


def find_or_probe(model: MetaModel, limit: ParameterLimit) -> ModelSpec:
    """Return the spec of an equal model of this run, or probe; raises what `probe_meta` raises."""
    known = KnownSpecs(_Files())  # type: ignore[arg-type]
    key = _key(model.config, limit)
    spec = known.find(key)
    if spec is None:
        spec = probe_meta(model, limit)
        known.note(key, spec)
    return spec


def trust_or_test(loaded: LoadedModel, memory: Memory) -> None:
    """Trust a model whose files have passed in this run, or test it; raises as `ensure_trusted`."""
    ensure_trusted(loaded, _SharedVerdicts(memory, loaded.identity))


def _key(config: Any, limit: ParameterLimit) -> str:
    content = json.loads(config.to_json_string(use_diff=False))
    content.pop("_name_or_path", None)
    facts = (type(config).__qualname__, content, repr(limit))
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def use() -> None:
    """Have this process, and its forks, probe and test each model once."""
    loader.probe_meta = find_or_probe  # type: ignore[assignment]
    assembly.ensure_trusted = trust_or_test
