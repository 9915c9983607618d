"""Every setting: its name, type, default and help, and the origin of its value.

Precedence: flags, `KVCHAT_*` environment, config.toml, defaults.
"""

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvchat.core.bounded_files import read_bounded
from kvchat.core.config import (
    KV_DTYPES,
    ROUNDING_VARIABLE,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Size,
    SpeculationConfig,
    parse_size,
    shown,
)
from kvchat.core.errors import UnreadableFile, UsageError
from kvchat.core.text import encoding_of, one_line
from kvchat.model.checkpoint.source import DEMO, DEMO_DRAFT
from kvchat_kernels.cpu.level import CPU_VARIABLE
from kvchat_kernels.cpu.object_cache import KERNEL_CACHE_VARIABLE

ENVIRONMENT_PREFIX = "KVCHAT_"
# The table of named servers, which `endpoints.py` reads.
ENDPOINTS = "endpoints"
# Keys are no settings: they stand in no file and are not shown.
API_KEY_VARIABLE, ENDPOINT_KEY_VARIABLE = "KVCHAT_API_KEY", "KVCHAT_ENDPOINT_KEY"
# Variables that are no settings, so no file sets them: docs/environment.md.
OTHER_VARIABLES = (CPU_VARIABLE, KERNEL_CACHE_VARIABLE, ROUNDING_VARIABLE)
_MAX_CONFIG_BYTES = 1 << 20
_MEND_IT = "Mend or remove it."
_MAX_SHOWN_CHARS = 120
# The largest signed 64-bit number.
_LEAST, _MOST = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `kind` is str, int, float, bool or list; `choices` limits a string."""

    name: str
    kind: type
    default: object
    help: str
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


SETTINGS = (
    Setting("model", str, "demo", "demo, a directory, or a Hugging Face id"),
    Setting(
        "endpoint",
        str,
        None,
        "chat with the model of this server; none: of no server at all",
    ),
    Setting("adapter", str, None, "directory of a LoRA adapter to merge into the model"),
    Setting("system", str, None, "system prompt of new conversations"),
    Setting("temperature", float, None, "0 is greedy; default: the model's own, else 0.7"),
    Setting("top_p", float, None, "keep the likeliest tokens up to this probability"),
    Setting("top_k", int, None, "keep this many likeliest tokens; 0 is off"),
    Setting("min_p", float, None, "drop tokens less likely than this share of the likeliest"),
    Setting("repetition_penalty", float, None, "above 1 makes repeating less likely"),
    Setting("seed", int, None, "same seed, same text; default: a new one per answer"),
    Setting("max_tokens", int, None, "most tokens of an answer"),
    Setting(
        "repetition_limit",
        int,
        2048,
        "end an answer that has repeated itself for this many tokens; 0 is off",
    ),
    Setting("stop", list, (), "end the answer at this text"),
    Setting(
        "think",
        str,
        "auto",
        "whether the model thinks first, or how much, where its template has a switch",
        ("auto", "on", "off", "low", "medium", "high"),
    ),
    Setting(
        "context_policy",
        str,
        "stop",
        "in a full context: refuse a message, drop the oldest ones, or let a summary replace them",
        ("stop", "drop", "compact"),
    ),
    Setting("tools", bool, False, "let the model read files here and run commands; it asks first"),
    Setting("allow_tool", list, (), "run this tool without a question"),
    Setting("tool_env", list, (), "let tools' commands see this variable, though it looks secret"),
    Setting(
        "timeout",
        float,
        None,
        "in scripts, seconds loading may take, and then each answer with its tools",
    ),
    Setting(
        "spec",
        bool,
        None,
        "draft tokens ahead: faster, the same text; default: with --draft, and for the demo pair",
    ),
    Setting("draft", str, None, "a small model with the same vocabulary to guess; ngram, none"),
    Setting("device", str, "auto", "where the model runs", ("auto", "cpu", "cuda")),
    Setting(
        "dtype", str, "auto", "auto: the checkpoint's", ("auto", "float32", "bfloat16", "float16")
    ),
    Setting("weights", str, "auto", "weights in fewer bits", ("auto", "int8", "int4")),
    Setting(
        "kv_dtype",
        str,
        "auto",
        "auto: the dtype; int8, k8v4, int4: 1.9, 2.5, 3.6 times the tokens of 16 bits",
        KV_DTYPES,
    ),
    Setting("block_size", int, 16, "tokens per cache block, a power of two"),
    Setting("threads", int, None, "CPU threads at most; default: the physical cores"),
    Setting(
        "device_cache",
        str,
        None,
        "KV memory on the device: 8G, 512M, or 20% of what is free; default: 25%, on a GPU 80%",
    ),
    Setting(
        "host_cache",
        str,
        None,
        "KV in RAM beside a GPU's: 8G; 0 is none; default: 10% of what is free, 16G at most",
    ),
    Setting(
        "disk_cache",
        str,
        None,
        "KV kept on disk, and as much of rounded weights: 5%; 0 is none; "
        "default: 10% of what is free, 20G at most",
    ),
    Setting(
        "cache_dir",
        str,
        None,
        "where KV is kept; unused KV goes after 30 days, and it can be deleted at any time",
    ),
    Setting("max_context", int, None, "lower the longest context, in tokens"),
    Setting("cache", bool, True, "reuse KV between turns"),
    Setting("graphs", bool, True, "capture decoding on a GPU as CUDA graphs"),
    Setting("incognito", bool, False, "save nothing"),
    Setting("sessions_dir", str, None, "where conversations are kept"),
    Setting("color", str, "auto", "colour on the terminal", ("auto", "always", "never")),
    Setting("accessible", bool, False, "plain lines: no toolbar, cursor motion or colour"),
    Setting(
        "stats", bool, None, "statistics after every answer; default: in a chat, not in scripts"
    ),
    Setting("quiet", bool, False, "in scripts, nothing on stderr but errors"),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
# What is named there has a name; as a path "" would be the working directory.
_NAMED = ("model", "endpoint", "adapter", "draft", "cache_dir", "sessions_dir")
# The settings that KV on disk depends on, besides the model.
OF_KV = ("kv_dtype", "dtype", "weights", "block_size")


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

    def blamed(self, error: UsageError) -> UsageError:
        """Return an error about a setting's value that names its flag or other origin."""
        named = error.message.removeprefix("--")
        for setting in SETTINGS:
            if not named.startswith(f"{setting.flag.removeprefix('--')} "):
                continue
            origin = self.origins.get(setting.name, setting.flag)
            if origin == setting.flag:
                return UsageError(f"--{named}", error.hint)
            return UsageError(named, f"{error.hint} It is set in {origin}.".strip())
        return error

    def model_config(self) -> ModelConfig:
        return ModelConfig(
            self["model"], self["device"], self["dtype"], self["threads"], self["weights"]
        )

    def cache_config(self, directory: Path | None = None) -> CacheConfig:
        """Return the cache's shape and budgets; `directory` is where KV may survive the process."""
        return CacheConfig(
            block_size=self["block_size"],
            device_bytes=self._size("device_cache"),
            host_bytes=self._size("host_cache"),
            kv_dtype=self["kv_dtype"],
            reuse=self["cache"],
            disk_bytes=self._size("disk_cache"),
            directory=directory,
        )

    def engine_config(self) -> EngineConfig:
        return EngineConfig(max_context=self["max_context"], graphs=self["graphs"])

    def speculation_config(self, model_name: str) -> SpeculationConfig:
        """Return the speculation settings for a chat with `model_name`."""
        draft = self["draft"]
        is_wanted = self["spec"]
        if is_wanted is None:
            is_wanted = draft is not None or model_name == DEMO
        if not is_wanted or draft == "none":
            return SpeculationConfig("off")
        return SpeculationConfig("ngram" if draft == "ngram" else "auto")

    def draft_name(self, model_name: str) -> str | None:
        """Return the name of the draft model for `model_name`; None for none."""
        if self["spec"] is False or self["draft"] in ("none", "ngram"):
            return None
        return self["draft"] or (DEMO_DRAFT if model_name == DEMO else None)

    def _size(self, name: str) -> Size | None:
        text = self[name]
        return parse_size(text, BY_NAME[name].flag) if text is not None else None


def resolve(
    flags: Mapping[str, object], environment: Mapping[str, str], config_path: Path
) -> Settings:
    """Merge the four sources; raises UsageError naming the source of a value that cannot be used.

    `flags` holds None for flags that were not given.
    """
    file_values = _known_values(config_path)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in SETTINGS:
        value, origin = setting.default, "default"
        if setting.name in file_values:
            place = f"{setting.name} in {config_path}"
            value = _checked(setting, file_values[setting.name], place)
            origin = str(config_path)
        text = environment.get(setting.variable)
        if text is not None and text != "":
            value, origin = _parsed(setting, text, setting.variable), setting.variable
        flag = flags.get(setting.name)
        if flag is not None and flag != [] and flag != ():
            value, origin = _checked(setting, flag, setting.flag), setting.flag
        values[setting.name] = value
        origins[setting.name] = origin
    return Settings(values, origins)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that looks like a kvchat setting but is none."""
    known_names = [setting.variable for setting in SETTINGS]
    known_names += [API_KEY_VARIABLE, ENDPOINT_KEY_VARIABLE, *OTHER_VARIABLES]
    sentences = []
    for name in sorted(environment):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in known_names:
            continue
        close = difflib.get_close_matches(name[:_MAX_SHOWN_CHARS], known_names, 1)
        hint = f"Is {close[0]} meant?" if close else "See `kvchat config show`."
        sentences.append(f"{one_line(name)} is no setting and is ignored. {hint}")
    return sentences


def read_config(path: Path) -> dict[str, object]:
    """Return a configuration file's values, empty if there is no file; raises UsageError."""
    try:
        data = read_bounded(path, _MAX_CONFIG_BYTES)
        return tomllib.loads(data.decode(encoding_of(data)))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.", _MEND_IT) from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError, as others are
        reason = one_line(str(error), _MAX_SHOWN_CHARS).rstrip(".")
        raise UsageError(f"{path} cannot be read: {reason}.", _MEND_IT) from error


def _known_values(path: Path) -> dict[str, object]:
    values = read_config(path)
    values.pop(ENDPOINTS, None)
    for name in values:
        if name not in BY_NAME:
            raise UsageError(
                f"{path} sets {shown(name)}, which is no setting.", "See `kvchat config`."
            )
    return values


def _parsed(setting: Setting, text: str, origin: str) -> object:
    """Convert the text of an environment variable or command to a value."""
    if setting.kind is bool:
        lowered = text.strip().lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise UsageError(f"{origin} is {shown(text)}, but must be true or false.")
    if setting.kind is list:
        return _checked(setting, (text,), origin)
    try:
        return _checked(setting, setting.kind(text), origin)
    except ValueError as error:
        raise UsageError(
            f"{origin} is {shown(text)}, but must be {_KIND_NAMES[setting.kind]}."
        ) from error


_KIND_NAMES = {int: "a whole number", float: "a number", str: "text", list: "a list of texts"}


def parse_value(name: str, text: str) -> object:
    """Convert text to a setting's value; raises UsageError for an unknown name or bad value."""
    return _parsed(known(name), text, name)


def known(name: str) -> Setting:
    """Return the setting with this name; raises UsageError if there is none."""
    if name not in BY_NAME:
        raise UsageError(f"{shown(name)} is no setting.", "See `kvchat config show`.")
    return BY_NAME[name]


def _is_of(kind: type, value: object) -> bool:
    if isinstance(value, float):
        return kind is float and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _checked(setting: Setting, value: object, origin: str) -> object:
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        raise UsageError(f"{origin} has more digits than any setting needs.")
    if isinstance(value, str) and "\0" in value:
        raise UsageError(f"{origin} has a NUL character, which no setting can hold.")
    if setting.name in _NAMED and isinstance(value, str) and not value.strip():
        raise UsageError(f"{origin} is empty.", "Leave it out for the default.")
    if setting.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if setting.kind is list and isinstance(value, list | tuple):
        value = tuple(str(item) for item in value)
        if "" in value:
            effect = ", which would stop every answer" if setting.name == "stop" else ""
            raise UsageError(f"{origin} is an empty text{effect}.")
    elif not _is_of(setting.kind, value):
        kind = "true or false" if setting.kind is bool else _KIND_NAMES[setting.kind]
        raise UsageError(f"{origin} is {shown(value)}, but must be {kind}.")
    if setting.choices and value not in setting.choices:
        raise UsageError(
            f"{origin} is {shown(value)}, but must be one of {', '.join(setting.choices)}."
        )
    return value
