"""A GGUF file's tokenizer gives the ids of the tokenizer.json it was made from."""

import json
from array import array
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from kvchat.chat.text_codec import Segment
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.gguf.file import GgufModel
from kvchat.model.gguf.tokenizer import read_gguf_text

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
GOLDEN = (
    "Hello, World! It's 2026; I'LL pay 1234567.89 €.",
    " leading  and   several    spaces\t\ttabs \n\n\nlines\r\n",
    "Zürich, naïve café; e\u0301 and \u00e9; Straße; ﬁne",
    "日本語のテキスト、中文文本。한국어 текст ελληνικά العربية हिन्दी",
    "👩‍👩‍👧 🏳️‍🌈 🦙\u200b\ufeff",
    "def f(x):\n    return x**2  # 100% sure\n\n\tif x != y: pass",
    "CamelCaseAndHTTPServer don't DON'T we've/they'd a\\b",
    "",
    " ",
    "▁ and ▁▁ as they are, <0x0A> too",
)
SPECIALS = ["<|start|>", "<|end|>"]
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The patterns in the tokenizer.json of Llama 3, Qwen 2 and SmolLM.
_SPLITS = {"llama-bpe": [_LETTERS + r"{1,3}|" + _ENDS], "qwen2": [f"{_LETTERS}|{_ENDS}"]}


def model_of(metadata: dict[str, Any], architecture: str = "llama") -> GgufModel:
    keys = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return GgufModel((), {"general.architecture": architecture, **keys}, {}, {})


def byte_level(rule: str) -> Tokenizer:
    """A tokenizer trained on the golden texts, with a rule's words, as its authors ship it."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    if rule in _SPLITS:
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in _SPLITS[rule]]
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, words])
    elif rule == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(GOLDEN * 3, trainer)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, rule: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of a byte-level tokenizer, padded to a larger model."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    count = tokenizer.get_vocab_size()
    kinds = [
        (_CONTROL if added[i].special else _USER_DEFINED) if i in added else 1 for i in range(count)
    ]
    tokens = [tokenizer.id_to_token(i) or "" for i in range(count)]
    return {
        "model": "gpt2",
        "pre": rule,
        "tokens": [*tokens, "[PAD0]", "[PAD1]"],
        "token_type": array("i", [*kinds, _UNUSED, _UNUSED]),
        "merges": [" ".join(pair) for pair in model["merges"]],
        "eos_token_id": count - 2,
    }


def assert_equal_ids(built: Tokenizer, original: Tokenizer, texts: tuple[str, ...]) -> None:
    for text in texts:
        expected = original.encode(text, add_special_tokens=False).ids
        assert built.encode(text, add_special_tokens=False).ids == expected, text
        assert built.decode(expected) == original.decode(expected)


@pytest.mark.parametrize("rule", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_byte_level_ids_equal_the_originals(rule: str) -> None:
    original = byte_level(rule)
    metadata = byte_level_metadata(original, rule)
    built = Tokenizer.from_str(read_gguf_text(model_of(metadata), "m").tokenizer_json)
    with_specials = tuple(f"<|start|>{text}<|end|><think>" for text in GOLDEN)
    assert_equal_ids(built, original, (*GOLDEN, *with_specials))


PIECES = [
    *("▁the", "▁te", "xt", "▁a", "▁and", "ll", "el", "▁H", "ello", "lo", "▁Hello", "ne", "nes"),
    *("er", "▁o", "al", "es", "li", "th", "▁t", "he", "nd", "▁s", "ev", "as", "▁▁", "▁▁▁▁", "y,"),
]


def sentencepiece(prefix: bool) -> tuple[Tokenizer, dict[str, Any]]:
    """A tokenizer in Llama 2's form, with what the converter writes of it."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted(
        {c for text in GOLDEN for c in text.replace(" ", "▁") if c.isascii() or c == "▁"}
    )
    letters = [c for c in letters if c not in "\n\r\t"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *PIECES, *letters, "<|start|>"]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256]
    kinds += [_NORMAL] * (len(PIECES) + len(letters)) + [_CONTROL]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))] + [-1e3] * (len(letters) + 1)
    vocab = {token: index for index, token in enumerate(tokens)}
    known = {*PIECES, *letters}
    merges = [
        (piece[:at], piece[at:])
        for piece in PIECES  # by falling score
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces: Any = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|start|>"])
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": array("i", kinds),
        "scores": array("f", scores),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
    }
    return tokenizer, metadata


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_equal_the_originals(prefix: bool) -> None:
    original, metadata = sentencepiece(prefix)
    files = read_gguf_text(model_of(metadata), "m")
    built = Tokenizer.from_str(files.tokenizer_json)
    assert_equal_ids(built, original, (*GOLDEN, *(f"<|start|>{text}" for text in GOLDEN)))
    assert files.adds_bos
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert files.stop_token_ids == (2,)


def test_gemmas_runs_of_spaces_are_tokens() -> None:
    """The converter writes them with real spaces and as the user's own; the model has "▁▁"."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "    ", "▁", "a", "▁a"]
    kinds = [3, 3, 3, 2, 4, 4, 1, 1, 1]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": array("i", kinds),
        "scores": array("f", [-1000.0] * 9),
        "add_space_prefix": False,
        "unknown_token_id": 3,
    }
    text = read_gguf_text(model_of(metadata, "gemma2"), "m").tokenizer_json
    assert Tokenizer.from_str(text).encode("a    a").ids == [7, 5, 7]


def test_the_digest_tells_what_kind_of_model_the_file_has() -> None:
    """Of the same pieces Gemma's are merged in another order."""
    _, metadata = sentencepiece(prefix=False)
    files = [read_gguf_text(model_of(metadata, kind), "x") for kind in ("llama", "gemma3", "llama")]

    assert files[0].digest == files[2].digest != files[1].digest


def test_control_tokens_in_a_users_text_stay_text() -> None:
    for metadata in (byte_level_metadata(byte_level("gpt-2"), "gpt-2"), sentencepiece(True)[1]):
        tokenizer = ChatTokenizer(read_gguf_text(model_of(metadata), "m"))
        start = tokenizer.token_id("<|start|>")
        assert tokenizer.encode([Segment("<|start|>hi")])[0] == start
        inert = tokenizer.encode([Segment("<|start|>hi", is_inert=True)])
        assert start not in inert
        assert tokenizer.decode(inert).strip() == "<|start|>hi"


def test_the_bos_flag_of_the_file_wins() -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), "gpt-2")
    for rule, flag, expected in (
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", True, True),
    ):
        given = {} if flag is None else {"add_bos_token": flag}
        files = read_gguf_text(model_of({**metadata, "pre": rule, **given}), "m")
        assert files.adds_bos is expected


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("deepseek-llm", ["Zo", "ë", " said", ":", " ", "中文", "1", "2", "\n"]),
        ("bloom", ["Say", " hello", ",", " twice", "!"]),
        ("kimi-k2", ["中文", "And", "Some", " text", " ", "123", "45"]),
        ("afmoe", ["1", "234", "567", " is", "一二", "more"]),
        ("seed-coder", ["a", "1", "2", " b", "!?", "\n"]),
    ],
)
def test_a_rules_words_are_those_its_authors_state(rule: str, words: list[str]) -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), rule)
    built = Tokenizer.from_str(read_gguf_text(model_of(metadata), "m").tokenizer_json)
    text = "".join(words)
    spans = [span for _, span in built.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == words


def test_a_rule_that_is_not_known_is_refused_by_name() -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), "of-next-year")
    with pytest.raises(ModelUnsupported, match="by the rule 'of-next-year'"):
        read_gguf_text(model_of(metadata), "m")
    with pytest.raises(ModelUnsupported, match="tokenizer of the kind bert"):
        read_gguf_text(model_of({**metadata, "model": "bert"}), "m")


def test_a_merge_without_a_space_merges_nothing() -> None:
    """llama.cpp reads such files; they were refused with the name of a Python class."""
    original = byte_level("gpt-2")
    metadata = byte_level_metadata(original, "gpt-2")
    metadata["merges"].insert(7, "nospace")
    built = Tokenizer.from_str(read_gguf_text(model_of(metadata), "m").tokenizer_json)
    assert_equal_ids(built, original, GOLDEN)


def test_a_file_without_merges_is_refused_and_not_read_byte_by_byte() -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), "gpt-2")
    del metadata["merges"]
    with pytest.raises(ModelError, match="has no merges"):
        read_gguf_text(model_of(metadata), "m")


def test_a_context_length_that_is_no_length_is_not_stated() -> None:
    model = model_of(byte_level_metadata(byte_level("gpt-2"), "gpt-2"))
    for stated, expected in ((512, 512), (-1, None), (0, None), ("long", None)):
        model.metadata["llama.context_length"] = stated
        assert read_gguf_text(model, "m").max_context == expected


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": []},
        {"tokens": "x"},
        {"token_type": array("i", [1])},
        {"merges": ["zzz qqq"]},
        {"merges": ["nospace"]},
        {"merges": []},
        {"merges": None},
        {"merges": "a b"},
        {"tokens": ["a"], "token_type": None},
    ],
)
def test_a_damaged_vocabulary_gives_one_sentence(damage: dict[str, Any]) -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), "gpt-2")
    with pytest.raises(ModelError) as caught:
        read_gguf_text(model_of({**metadata, **damage}), "m")
    assert "\n" not in caught.value.message


def test_the_authors_sampling_settings_are_used() -> None:
    model = model_of(byte_level_metadata(byte_level("gpt-2"), "gpt-2"))
    model.metadata["general.sampling.temp"] = 0.5
    model.metadata["general.sampling.top_k"] = "many"
    assert read_gguf_text(model, "m").sampling_defaults == {"temperature": 0.5}
