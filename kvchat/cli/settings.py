"""Settings: the value of every parameter, and where it comes from.

Precedence: flags, `KVCHAT_*` environment, config.toml, defaults.
"""

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvchat.core.config import (
    ROUNDING_VARIABLE,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SharedConfig,
    SpeculationConfig,
)
from kvchat.core.errors import UsageError
from kvchat.core.parameters import BY_NAME, PARAMETERS, Parameter
from kvchat.core.paths import from_anywhere, text_or_file, user_path
from kvchat.core.text import Size, one_line, parse_size, shown
from kvchat.core.toml_text import read_table
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT
from kvchat_kernels.cpu.level import CPU_VARIABLE
from kvchat_kernels.cpu.object_cache import KERNEL_CACHE_VARIABLE

ENVIRONMENT_PREFIX = "KVCHAT_"
# The table of named servers, which `endpoints.py` reads.
ENDPOINTS = "endpoints"
# Keys are no settings: they stand in no file and are not shown.
API_KEY_VARIABLE, ENDPOINT_KEY_VARIABLE = "KVCHAT_API_KEY", "KVCHAT_ENDPOINT_KEY"
SHARED_KEY_VARIABLE = "KVCHAT_SHARED_KEY"
# Variables that are no settings, so no file sets them: docs/environment.md.
OTHER_VARIABLES = (CPU_VARIABLE, KERNEL_CACHE_VARIABLE, ROUNDING_VARIABLE)
# The value of `endpoint` for no server at all, and values of `draft` that are no models.
NO_ENDPOINT, NO_DRAFT, NGRAM = "none", "none", "ngram"
# What belongs to a model, and how it was asked to run: the first is saved with every conversation.
_OF_MODEL = ("endpoint", "adapter", "draft")
_RUNS_AS = ("spec", "dtype", "weights", "kv_dtype", "max_context")
_CONVERSATION = "the conversation"
_MAX_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class Settings:
    """Resolved values, and the origin of each."""

    values: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def with_model(self, name: str) -> "Settings":
        """Return the settings with another spelling of the model's name."""
        return Settings({**self.values, "model": name}, self.origins)

    def is_flag(self, name: str) -> bool:
        """Whether the value is of a flag."""
        return self.origins.get(name) == BY_NAME[name].flag

    @property
    def names_model(self) -> bool:
        """Whether a flag names the model, or the server that has it."""
        return self.is_flag("model") or self.is_flag("endpoint")

    def of_model(self, model: str) -> dict[str, Any]:
        """Return how a model runs, as a conversation with it is saved: values for JSON by names."""
        values = {name: self[name] for name in _OF_MODEL if self[name] is not None}
        if model != self["model"]:
            values.pop("adapter", None)
        if values.get("endpoint") == NO_ENDPOINT:
            del values["endpoint"]
        for name in values.keys() & {"adapter", "draft"}:
            if values[name] not in (NO_DRAFT, NGRAM):
                values[name] = name_to_keep(values[name])
        chosen = {name: self[name] for name in _RUNS_AS if self._is_chosen(name)}
        return {**values, **chosen}

    def _is_chosen(self, name: str) -> bool:
        return self.is_flag(name) or self.origins.get(name) == _CONVERSATION

    def in_conversation(self, model: str, saved: Mapping[str, Any] | None) -> "Settings":
        """Return the settings with which a saved conversation goes on, but for what flags say.

        model   the model that answered last
        saved   what the conversation was saved with, by names; None if an earlier version saved it

        A flag that names a model or a server leaves nothing of the conversation's model.
        """
        if not model or self.names_model:
            return self
        taken: dict[str, Any] = {"model": model}
        if saved is not None:
            taken |= {name: saved.get(name) for name in _OF_MODEL}
            taken |= {name: saved[name] for name in _RUNS_AS if name in saved}
            if taken["endpoint"] is None and self["endpoint"] is not None:
                taken["endpoint"] = NO_ENDPOINT
        elif model != self["model"]:
            taken |= {"adapter": None, "draft": None}
        values, origins = dict(self.values), dict(self.origins)
        for name, value in taken.items():
            if self.is_flag(name):
                continue
            with suppress(UsageError):  # a file that was changed by hand
                whole = BY_NAME[name].checked(value, name) if value is not None else None
                values[name], origins[name] = whole, _CONVERSATION
        return Settings(values, origins)

    @property
    def system(self) -> str | None:
        """The system prompt, which a file may hold; raises UnreadableFile."""
        given = self["system"]
        return text_or_file(given) if given is not None else None

    def model_config(self) -> ModelConfig:
        return ModelConfig(
            self["model"], self["device"], self["dtype"], self["threads"], self["weights"]
        )

    def cache_config(
        self, directory: Path | None = None, shared: SharedConfig | None = None
    ) -> CacheConfig:
        """Return the cache's shape and budgets; `directory` is where KV may survive the process."""
        return CacheConfig(
            block_size=self["block_size"],
            device_bytes=self._size("device_cache"),
            host_bytes=self._size("host_cache"),
            kv_dtype=self["kv_dtype"],
            reuse=self["cache"],
            disk_bytes=self._size("disk_cache"),
            directory=directory,
            shared=shared,
        )

    def engine_config(self) -> EngineConfig:
        path = self["trace_log"]
        trace = user_path(path) if path and not self["incognito"] else None
        return EngineConfig(max_context=self["max_context"], graphs=self["graphs"], trace=trace)

    def speculation_config(self, model_name: str) -> SpeculationConfig:
        """Return the speculation settings for a chat with `model_name`."""
        draft = self["draft"]
        is_wanted = self["spec"]
        if is_wanted is None:
            is_wanted = draft is not None or model_name == DEMO
        if not is_wanted or draft == NO_DRAFT:
            return SpeculationConfig("off")
        return SpeculationConfig("ngram" if draft == NGRAM else "auto")

    def draft_name(self, model_name: str) -> str | None:
        """Return the name of the draft model for `model_name`; None for none."""
        if self["spec"] is False or self["draft"] in (NO_DRAFT, NGRAM):
            return None
        return self["draft"] or (DEMO_DRAFT if model_name == DEMO else None)

    def _size(self, name: str) -> Size | None:
        text = self[name]
        return parse_size(text, BY_NAME[name].flag) if text is not None else None


def name_to_keep(model: str) -> str:
    """Return a model's name as a conversation keeps it: it must hold in other directories too."""
    return model if model in (DEMO, DEMO_DRAFT) else from_anywhere(model)


def resolve(
    flags: Mapping[str, object], environment: Mapping[str, str], config_path: Path
) -> Settings:
    """Merge the four sources; raises UsageError naming the source of a value that cannot be used.

    `flags` holds None for flags that were not given.
    """
    file_values = _known_values(config_path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for parameter in PARAMETERS:
        name, value, origin = parameter.name, parameter.default, "default"
        if name in file_values:
            value = parameter.checked(file_values[name], f"{name} in {config_path}")
            origin = str(config_path)
        if text := environment.get(parameter.variable):
            origin = parameter.variable
            value = parameter.parsed(text, origin)
        flag = flags.get(name)
        if flag is not None and flag != [] and flag != ():
            origin = parameter.flag
            value = flag_value(parameter, flag)
        values[name], origins[name] = value, origin
    return Settings(values, origins)


def flag_value(parameter: Parameter, given: object) -> Any:
    """Return the value of a flag, which the command line has as text; raises UsageError."""
    read = parameter.parsed if isinstance(given, str) else parameter.checked
    return read(given, parameter.flag)  # type: ignore[arg-type]


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that looks like a kvchat setting but is none."""
    known_names = [parameter.variable for parameter in PARAMETERS]
    known_names += [API_KEY_VARIABLE, ENDPOINT_KEY_VARIABLE, SHARED_KEY_VARIABLE]
    known_names += OTHER_VARIABLES
    sentences = []
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in known_names:
            continue
        close = difflib.get_close_matches(name[:_MAX_SHOWN_CHARS], known_names, 1)
        hint = f"Is {close[0]} meant?" if close else "See `kvchat config show`."
        sentences.append(f"{one_line(name)} is no setting and is ignored. {hint}")
    return sentences


def _known_values(path: Path) -> dict[str, object]:
    values = read_table(path)
    values.pop(ENDPOINTS, None)
    for name in values:
        if name not in BY_NAME:
            raise UsageError(
                f"{path} sets {shown(name)}, which is no setting.", "See `kvchat config`."
            )
    return values


def known(name: str) -> Parameter:
    """Return the parameter with this name; raises UsageError if there is none."""
    if name not in BY_NAME:
        raise UsageError(f"{shown(name)} is no setting.", "See `kvchat config show`.")
    return BY_NAME[name]
