"""Damaged tokenizers and templates load, or are refused with a typed error; nothing else."""

import json
import random
from copy import deepcopy
from datetime import datetime
from typing import Any

from kvchat.chat.template import NewTurn, turn_format
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import ModelError
from kvchat.model.files.text_settings import TextFiles
from support import template_zoo
from support.odd_tokenizers import ODD
from support.soak_sizes import short_and_long
from support.tokenizer_zoo import END, START, ZOO, text_files

CLOCK = datetime(2026, 1, 2, 3, 4)
TEXTS = ["Hello there", f"a{END} \u2603 {START}", "", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"]
VALUES = [
    *(None, True, 0, -1, 1, 2**31, 2**64, 1e308, "", "a", "</s>", "\u2581", [], {}, ["a", "b"]),
    *({"Regex": "(a+)+$"}, {"Regex": "("}, {"String": ""}, "WordLevel", "ByteLevel", "Unigram"),
]
SCRAPS = [
    *(
        "{%",
        "%}",
        "{{",
        "}}",
        "(",
        ")",
        "[",
        "]",
        "'",
        "|",
        "~",
        " * 9",
        " ** 9",
        "loop",
        "messages",
    ),
    *("{% for i in range(99999) %}", "{% endfor %}", "{% if", "{% endif %}", "{% set m =", "self"),
    *(
        "{{ messages }}",
        "{{ m.content * 99999 }}",
        "{% macro m() %}",
        "{% endmacro %}",
        "{{ m() }}",
    ),
]


def refusal(files: TextFiles) -> str | None:
    """Use text files as a chat does; return the sentence that refuses them, if one does."""
    try:
        tokenizer = ChatTokenizer(files)
        turns = turn_format(files, tokenizer)
        for text in TEXTS:
            ids = [
                *turns.opening(NewTurn(text, CLOCK)),
                *turns.following(NewTurn(text, CLOCK), None),
            ]
            assert all(isinstance(token, int) for token in ids)
            tokenizer.decode(ids)
            stream = tokenizer.new_stream(ids)
            "".join(map(stream.feed, ids)) + stream.flush()
    except ModelError as error:
        return str(error)
    return None


def is_sentence(text: str) -> bool:
    return text.endswith(".") and "\n" not in text and text.isprintable()


def places(node: Any) -> list[tuple[Any, Any]]:
    """Return every container in a document with each of its keys."""
    found = []
    pending = [node]
    while pending:
        current = pending.pop()
        keys = list(current) if isinstance(current, dict) else range(len(current))
        found += [(current, key) for key in keys]
        pending += [current[key] for key in keys if isinstance(current[key], dict | list)]
    return found


def damaged_json(rng: random.Random, source: str) -> str:
    document = json.loads(source)
    vocab = document["model"].pop("vocab")  # or nearly all damage would be to it
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(places(document))
        if rng.random() < 0.3:
            del container[key]
        else:
            container[key] = deepcopy(rng.choice(VALUES))
    if isinstance(document.get("model"), dict):
        if rng.random() < 0.3:
            container, key = rng.choice(places(vocab))
            container[key] = deepcopy(rng.choice(VALUES))
        document["model"].setdefault("vocab", vocab)
    return json.dumps(document)


def damaged_text(rng: random.Random, source: str) -> str:
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(source))
        end = min(len(source), start + rng.choice((0, 0, 1, 5, 30)))
        source = source[:start] + rng.choice(["", *SCRAPS]) + source[end:]
    return source


@short_and_long(80, 20_000)
def test_a_damaged_tokenizer_loads_or_is_refused(size: int) -> None:
    rng = random.Random(5)
    whole = [
        *(text_files(make(), None) for make in ZOO.values()),
        *(m().files for m in ODD.values()),
    ]
    told = []
    for _ in range(size):
        files = rng.choice(whole)
        damaged = damaged_json(rng, files.tokenizer_json)
        told.append(refusal(TextFiles(damaged, None, files.special_tokens, files.stop_token_ids)))
    assert None in told
    assert set(told) != {None}
    assert all(is_sentence(text) for text in told if text is not None)


@short_and_long(6, 1_500)
def test_a_damaged_template_loads_or_is_refused(size: int) -> None:
    rng = random.Random(6)
    everything = vars(template_zoo).items()
    sources = [value for name, value in everything if name.isupper() and isinstance(value, str)]
    for _ in range(size):
        source = damaged_text(rng, rng.choice(sources))
        told = refusal(text_files(ZOO["byte level"](), source))
        assert told is None or is_sentence(told), source
