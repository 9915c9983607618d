"""Parameter and the table of all: the one place that names them, their ranges, defaults and help.

Flags, `config.toml`, `KVCHAT_*` variables, `/set`, JSON lines and HTTP fields are read from it.
`cli/flags.py` has the rows that are flags of one command and nothing else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import partial
from typing import Any

from kvchat.core.errors import UsageError
from kvchat.core.schemas import TEXT, read_format
from kvchat.core.text import parse_size, shown

# Every place that takes a value of a parameter (a flag, the environment, config.toml, /set, a field
# of JSON) checks it here, so a bad value is refused in the same words everywhere.

# The largest signed 64-bit number.
MOST = 2**63 - 1
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Words that take a value back: the second ones leave it to the default.
_OFF_WORDS, _DEFAULT_WORDS = ("none", "off"), ("default", "random")


class Kind(Enum):
    """The kind of a parameter's values, and what a sentence calls one."""

    TEXT = "a text"
    NAME = "a name"  # never empty, as the next two
    PATH = "a path"
    NAME_OR_PATH = "a name or a path"
    SIZE = "a size"
    WHOLE = "a whole number"
    NUMBER = "a number"
    SWITCH = "true or false"
    TEXTS = "a text or a list of texts"


class Group(StrEnum):
    """The headings of help, in its order."""

    CONVERSATION = "Conversation"
    SERVER = "Server"
    BENCH = "Measurement"
    MODEL = "Model"
    ANSWER = "Answer"
    TOOLS = "Tools"
    CACHE = "Cache and saving"
    SCRIPTS = "Scripts"
    TERMINAL = "Terminal"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. Its name is that of config.toml and of JSON fields.

    unit        stands for a value in help
    default     the value where none is given; None if something else decides
    otherwise   says what that is, or what the default means
    choices     the texts that it may be
    least, most   the range of a number
    rule, words   what else must hold of a value, and how errors say it; words alone say the range
    off         the value that switches it off; None for none
    short       a flag of one letter
    switches_off   whether a switch has a flag for no, too
    read        makes of a given value, and the place that errors name, the value that is held
    """

    name: str
    help: str
    kind: Kind = Kind.TEXT
    unit: str = "TEXT"
    group: Group = Group.MODEL
    default: Any = None
    otherwise: str = ""
    choices: tuple[str, ...] = ()
    least: float = -MOST
    most: float = MOST
    rule: Callable[[Any], bool] | None = None
    words: str = ""
    off: Any = None
    short: str = ""
    switches_off: bool = True
    read: Callable[[object, str], Any] | None = None

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"KVCHAT_{self.name.upper()}"

    @property
    def flag(self) -> str:
        return f"--{self.dashed}"

    @property
    def dashed(self) -> str:
        """Its name as `/set` and flags have it."""
        return self.name.rstrip("_").replace("_", "-")

    @property
    def allowed(self) -> str:
        """The values that it may have, as the end of a sentence."""
        if self.words:
            return self.words
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.most < MOST:
            return f"{self.least:g} to {self.most:g}"
        return f"{self.least:g} or more" if self.least > -MOST else self.kind.value

    @property
    def full_help(self) -> str:
        """Its help with choices, range and default."""
        limits = ", ".join(self.choices) or (
            "" if self.allowed == self.kind.value else self.allowed
        )
        has_default = isinstance(self.default, str | int | float) and self.default != ""
        has_default = has_default and self.kind is not Kind.SWITCH
        default = self.otherwise or (str(self.default) if has_default else "")
        notes = [limits, f"default: {default}" if default else ""]
        told = "; ".join(note for note in notes if note)
        return f"{self.help} [{told}]" if told else self.help

    def refusal(self, value: object, place: str, allowed: str = "") -> UsageError:
        """Return the error for a bad value."""
        return UsageError(f"{place} is {shown(value)}, but must be {allowed or self.allowed}.")

    def checked(self, value: object, place: str) -> Any:
        """Return a value as its kind has it; raises UsageError for one that cannot be used.

        place   names the parameter in errors: `--top-p`, `KVCHAT_TOP_P`, `top_p of line 3`
        """
        if self.read is not None:
            return self.read(value, place)
        if self.kind is Kind.TEXTS:
            return self._checked_texts(value, place)
        if self.kind in (Kind.WHOLE, Kind.NUMBER):
            value = self._checked_number(value, place)
        elif not isinstance(value, bool if self.kind is Kind.SWITCH else str):
            raise self.refusal(value, place, self.kind.value)
        if isinstance(value, str):
            value = self._checked_text(value, place)
        if self.rule is not None and not self.rule(value):
            raise self.refusal(value, place)
        return value

    def parsed(self, text: str, place: str) -> Any:
        """Return the value that a flag, a variable or a command writes as text."""
        if self.kind is Kind.TEXTS:
            return self.checked((text,), place)
        if self.kind is Kind.SWITCH:
            word = text.strip().lower()
            return self.checked(word in _ON if word in (*_ON, *_OFF) else text, place)
        if self.kind not in (Kind.WHOLE, Kind.NUMBER):
            return self.checked(text, place)
        try:
            value = int(text) if self.kind is Kind.WHOLE else float(text)
        except ValueError as error:
            raise self.refusal(text, place, self.kind.value) from error
        return self.checked(value, place)

    def taken_back(self, text: str) -> tuple[Any] | None:
        """Return the value for a word such as none, off or default, in a tuple; None for others."""
        word = text.strip().lower()
        kinds = (Kind.WHOLE, Kind.NUMBER, Kind.TEXTS, Kind.SIZE)
        if word in self.choices or self.kind not in kinds:
            return None
        if word in _OFF_WORDS and self.off is not None:
            return (self.off,)
        is_own = self.off is None and word in _OFF_WORDS
        return (self.default,) if is_own or word in _DEFAULT_WORDS else None

    def _checked_number(self, value: object, place: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value != value:  # NaN is no number
            raise self.refusal(value, place, self.kind.value)
        assert isinstance(value, int | float)
        if abs(value) > MOST:
            raise self.refusal(value, place, "nearer to 0")
        if self.kind is Kind.WHOLE and value != int(value):
            raise self.refusal(value, place, self.kind.value)
        number = int(value) if self.kind is Kind.WHOLE else float(value)
        if not self.least <= number <= self.most:
            raise self.refusal(value, place)
        return number

    def _checked_text(self, value: str, place: str) -> str:
        if "\0" in value:
            raise UsageError(f"{place} has a NUL character, which no setting can hold.")
        if self.kind in (Kind.NAME, Kind.PATH, Kind.NAME_OR_PATH) and not value.strip():
            # As a path an empty text would be the working directory.
            raise UsageError(f"{place} is empty.", "Leave it out for the default.")
        if self.kind is Kind.SIZE:
            parse_size(value, place)
        word = value.strip().lower()
        if self.choices and word not in self.choices:
            raise self.refusal(value, place)
        return word if self.choices else value

    def _checked_texts(self, value: object, place: str) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else value
        is_list = isinstance(texts, list | tuple) and all(isinstance(t, str) for t in texts)
        if not is_list:
            raise self.refusal(value, place, self.kind.value)
        assert isinstance(texts, list | tuple)
        if "" in texts:
            effect = ", which would stop every answer" if self.name == "stop" else ""
            raise UsageError(f"{place} is an empty text{effect}.")
        return tuple(texts)


new_text = Parameter
new_name = partial(Parameter, kind=Kind.NAME, unit="NAME")
new_path = partial(Parameter, kind=Kind.PATH, unit="DIR")
new_name_or_path = partial(Parameter, kind=Kind.NAME_OR_PATH, unit="NAME")
new_size = partial(Parameter, kind=Kind.SIZE, unit="SIZE")
new_whole = partial(Parameter, kind=Kind.WHOLE, unit="N")
new_number = partial(Parameter, kind=Kind.NUMBER, unit="X")
new_switch = partial(Parameter, kind=Kind.SWITCH, unit="")
new_texts = partial(Parameter, kind=Kind.TEXTS, unit="NAME", default=())


def new_choice(name: str, help: str, choices: tuple[str, ...], unit: str = "NAME") -> Parameter:
    """Return a parameter that is one of some texts; the first is its default."""
    return Parameter(name, help, unit=unit, default=choices[0], choices=choices)


def grouped(group: Group, *parameters: Parameter) -> tuple[Parameter, ...]:
    """Return parameters that help has under one heading."""
    return tuple(replace(parameter, group=group) for parameter in parameters)


DTYPES = ("auto", "float32", "bfloat16", "float16")
# The forms of weights that round them.
FEWER_BITS = ("int8", "int4")
# Forms of KV that no model computes in: numbers of 8 or 4 bits with scales, the finest first.
KV_CODES = ("int8", "fp8", "k8v4", "int4")
_LEAST_REPETITION = 128
# Outside of these an answer may be noise; each is allowed all the same.
USUAL = {"temperature": (0.0, 2.0), "min_p": (0.0, 0.5), "repetition_penalty": (0.8, 2.0)}

_MODEL = grouped(
    Group.MODEL,
    new_name_or_path(
        "model",
        "demo, a directory, a .gguf file, ollama:NAME, or a Hugging Face id",
        default="demo",
        short="-m",
    ),
    new_texts("model_dir", "look for models in this directory too (repeat)", unit="DIR"),
    new_name(
        "endpoint", "use the model of this server; none: of no server at all", unit="URL|NAME"
    ),
    new_path("adapter", "a LoRA adapter to merge into the model"),
    new_name_or_path("draft", "a small model with the same vocabulary to guess; ngram, none"),
    new_switch(
        "spec",
        "draft tokens ahead: faster, the same text",
        otherwise="on with --draft, and for the demo pair",
    ),
    new_choice("device", "where the model runs", ("auto", "cpu", "cuda")),
    new_choice("dtype", "the numbers it computes in; auto: the checkpoint's", DTYPES),
    new_choice("weights", "weights in fewer bits", ("auto", *FEWER_BITS)),
    # OpenMP starts as many threads as asked, and aborts the program if it cannot.
    new_whole("threads", "CPU threads at most", otherwise="the physical cores", least=1, most=1024),
    new_whole(
        "max_context", "lower the longest context, in tokens", otherwise="the model's own", least=1
    ),
    new_number(
        "keep_alive",
        "minutes that a server stays after its last use; a prompt starts one",
        unit="MIN",
        otherwise="10 for a prompt at a terminal",
        least=0,
        most=1e6,
        words="0 (off) or more",
    ),
    new_switch("graphs", "capture decoding on a GPU as CUDA graphs", default=True, otherwise="on"),
)

SAMPLING = grouped(
    Group.ANSWER,
    new_number(
        "temperature", "0 is greedy", otherwise="the model's own, else 0.7", least=0, most=100
    ),
    new_number(
        "top_p",
        "keep the likeliest tokens up to this probability",
        otherwise="the model's own, else 0.95",
        least=0,
        most=1,
        rule=lambda value: value > 0,
        words="above 0 and at most 1",
        off=1.0,
    ),
    new_whole(
        "top_k",
        "keep this many likeliest tokens",
        otherwise="the model's own, else 40",
        least=0,
        words="0 (off) or more",
        off=0,
    ),
    new_number(
        "min_p",
        "drop tokens less likely than this share of the likeliest",
        otherwise="the model's own, else 0.05",
        least=0,
        most=1,
        off=0.0,
    ),
    new_number(
        "repetition_penalty",
        "above 1 makes repeating less likely",
        otherwise="the model's own, else 1",
        least=0.01,
        most=100,
        off=1.0,
    ),
)

# Fields of HTTP requests that are no settings.
PENALTIES = grouped(
    Group.ANSWER,
    new_number("presence_penalty", "make tokens of the answer rarer", least=-2, most=2, off=0.0),
    new_number("frequency_penalty", "the same, for each time", least=-2, most=2, off=0.0),
)

# What changes one answer: the fields of JSON requests, and the settings of `/set`.
OF_ANSWERS = (
    *SAMPLING,
    *grouped(
        Group.ANSWER,
        new_whole("seed", "same seed, same text", otherwise="a new one per answer"),
        new_whole("max_tokens", "most tokens of an answer", otherwise="as many as fit", least=1),
        # Ordinary text repeats itself for less than the least limit.
        new_whole(
            "repetition_limit",
            "end an answer that has repeated itself for this many tokens",
            default=_LEAST_REPETITION,
            least=0,
            rule=lambda value: value == 0 or value >= _LEAST_REPETITION,
            words=f"0 (off) or at least {_LEAST_REPETITION}",
            off=0,
        ),
        new_texts("stop", "end the answer at this text (repeat)", unit="TEXT"),
        new_choice(
            "think",
            "whether the model thinks first, or how much, where its template has a switch",
            ("auto", "on", "off", "low", "medium", "high"),
            "HOW",
        ),
        new_text(
            "format",
            "text, json, or what a schema says: JSON, a file, 'name: string, age: integer'",
            unit="FORMAT",
            default=TEXT,
            read=read_format,
        ),
        new_choice(
            "context_policy",
            "in a full context: refuse a message, drop the oldest, or let a summary replace them",
            ("stop", "drop", "compact"),
            "HOW",
        ),
        new_size(
            "kv_budget",
            "KV an answer may take, 512M or 25% of its context's: what it needs least is dropped",
            otherwise="all of it",
            rule=lambda value: parse_size(value, "kv-budget").resolve(MOST) > 0,
            words="a size like 512M or 25%",
        ),
    ),
)

_OTHERS = (
    *grouped(
        Group.ANSWER,
        new_text("system", "system prompt of new conversations: a text or @FILE", short="-s"),
    ),
    *grouped(
        Group.SCRIPTS,
        # Thirty years at most: a wait for a lock counts nanoseconds in 64 bits.
        new_number(
            "timeout",
            "seconds that loading may take, and then each answer with its tools",
            unit="S",
            otherwise="none",
            least=0,
            most=1e9,
            rule=lambda value: value > 0,
            words="more than 0 seconds and at most 1e9",
        ),
    ),
    *grouped(
        Group.TOOLS,
        new_switch(
            "tools", "let the model read files here and run commands; it asks first", default=False
        ),
        new_texts("allow_tool", "run this tool without a question (repeat)"),
        new_texts(
            "tool_env", "let tools' commands see this variable, though it looks secret (repeat)"
        ),
    ),
)

_CACHE = grouped(
    Group.CACHE,
    new_choice(
        "kv_dtype",
        "auto: the dtype, fewer bits if short of memory; int8, fp8, k8v4, int4: 1.9 to 3.6x tokens",
        (*DTYPES, *KV_CODES),
    ),
    new_whole(
        "block_size",
        "tokens per cache block",
        default=16,
        least=1,
        most=1024,
        rule=lambda size: size & (size - 1) == 0,
        words="a power of two up to 1024",
    ),
    new_size(
        "device_cache",
        "KV memory on the device: 8G, 512M, or 20% of what is free",
        otherwise="25% of what is free, on a GPU 80%",
    ),
    new_size(
        "host_cache",
        "KV in RAM beside a GPU's: 8G; 0 is none",
        otherwise="with a GPU 10% of what is free, 16G at most",
    ),
    new_size(
        "disk_cache",
        "KV kept on disk, and as much of rounded weights: 5%; 0 is none",
        otherwise="10% of what is free, 20G at most",
    ),
    new_path(
        "cache_dir",
        "where KV is kept; unused KV goes after 30 days, and it can be deleted at any time",
    ),
    new_path(
        "trace_log",
        "append hashes, counts and times of each request, for kvchat bench trace; no text",
    ),
    new_name(
        "shared_cache",
        "KV that machines share: valkey://HOST, s3://BUCKET, file:///DIR",
        unit="URL",
    ),
    new_path(
        "shared_key_file",
        "the file with the team's key of --shared-cache",
        otherwise="KVCHAT_SHARED_KEY",
    ),
    new_choice(
        "share",
        "what --shared-cache gets: system prompts and pins made with --share, or everything",
        ("pins", "all"),
        "WHAT",
    ),
    new_switch(
        "shared_encryption",
        "encrypt what --shared-cache gets, and do not only sign it",
        default=True,
        otherwise="on",
    ),
    new_whole(
        "shared_deadline",
        "milliseconds in which the shared cache has to begin an answer",
        default=50,
        least=1,
        most=60_000,
    ),
    new_name(
        "prefill_at",
        "have this kvchat serve --role prefill read what may go to --shared-cache, where quicker",
        unit="URL",
    ),
    new_switch("cache", "reuse KV between turns", default=True, otherwise="on"),
    new_switch("incognito", "save nothing", default=False),
    new_path("sessions_dir", "where conversations are kept"),
)

_SCREEN = (
    *grouped(
        Group.TERMINAL,
        new_choice("color", "colour on the terminal", ("auto", "always", "never"), "WHEN"),
        new_switch("accessible", "plain lines: no toolbar, cursor motion or colour", default=False),
        new_switch(
            "stats",
            "statistics after every answer, in scripts on stderr",
            otherwise="on in a chat, off in scripts",
        ),
    ),
    *grouped(
        Group.SCRIPTS,
        new_switch("quiet", "nothing on stderr but errors", default=False, short="-q"),
    ),
)

# Everything that has a place in config.toml and a variable in the environment.
PARAMETERS = (*_MODEL, *OF_ANSWERS, *_OTHERS, *_CACHE, *_SCREEN)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
# The parameters that KV on disk depends on, besides the model.
OF_KV = ("kv_dtype", "dtype", "weights", "block_size")


def require(**values: object) -> None:
    """Raise UsageError for a value that its parameter cannot have; None is no value."""
    for name, value in values.items():
        if value is not None:
            BY_NAME[name].checked(value, BY_NAME[name].flag)


def check_fields(holder: object, parameters: Iterable[Parameter]) -> None:
    """Raise UsageError for a field of `holder` that the parameter of its name does not allow."""
    for parameter in parameters:
        parameter.checked(getattr(holder, parameter.name), parameter.dashed)
