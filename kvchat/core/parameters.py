"""The table of parameters: the one place that names them, their ranges, defaults and help.

Flags, `config.toml`, `KVCHAT_*` variables, `/set`, JSON lines and HTTP fields are read from it.
`cli/flags.py` has the rows that are flags of one command and nothing else.
"""

from kvchat.core.parameter import (
    Group,
    grouped,
    new_choice,
    new_name,
    new_name_or_path,
    new_number,
    new_path,
    new_size,
    new_switch,
    new_text,
    new_texts,
    new_whole,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
# The forms of weights that round them.
FEWER_BITS = ("int8", "int4")
# Forms of KV that no model computes in: numbers of 8 or 4 bits with scales.
KV_CODES = ("int8", "k8v4", "int4")
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
        otherwise="the model's own, else 1",
        least=0,
        most=1,
        rule=lambda value: value > 0,
        words="above 0 and at most 1",
        off=1.0,
    ),
    new_whole(
        "top_k",
        "keep this many likeliest tokens",
        otherwise="the model's own, else 0",
        least=0,
        words="0 (off) or more",
        off=0,
    ),
    new_number(
        "min_p",
        "drop tokens less likely than this share of the likeliest",
        otherwise="the model's own, else 0",
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
            default=2048,
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
    ),
)

# The settings of `/set`: those of its answers, and of the conversation.
OF_CHATS = (
    *OF_ANSWERS,
    *grouped(
        Group.CONVERSATION,
        new_choice(
            "context_policy",
            "in a full context: refuse a message, drop the oldest, or let a summary replace them",
            ("stop", "drop", "compact"),
            "HOW",
        ),
    ),
)

_OTHERS = (
    *grouped(
        Group.ANSWER,
        new_text("system", "system prompt of new conversations", short="-s"),
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
        "auto: the dtype; int8, k8v4, int4: 1.9, 2.5, 3.6 times the tokens of 16 bits",
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
PARAMETERS = (*_MODEL, *OF_CHATS, *_OTHERS, *_CACHE, *_SCREEN)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
# The parameters that KV on disk depends on, besides the model.
OF_KV = ("kv_dtype", "dtype", "weights", "block_size")


def require(**values: object) -> None:
    """Raise UsageError for a value that its parameter cannot have; None is no value."""
    for name, value in values.items():
        if value is not None:
            BY_NAME[name].checked(value, BY_NAME[name].flag)
