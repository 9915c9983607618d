"""The layout of tokenizer.json: what of it the library does not check, and a twin without some ids.

The twin cannot make these ids out of text, however the text spells them. Does not know which ids
they are, or why.
"""

import json
import re
import secrets
from collections.abc import Set
from typing import Any

from tokenizers import Tokenizer


def plain_tokenizer(tokenizer_json: str, kept_out: Set[int]) -> Tokenizer:
    """Return the same tokenizer without added tokens, and without the pieces of some ids.

    An id stays in its place under a name that no text can spell, so all other ids stay as they
    are; an unknown character still gives the id of the unknown token, be that one of them.
    """
    content = json.loads(tokenizer_json)
    # None of them may stay: the library numbers those beyond the vocabulary anew.
    content |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    _rename(content["model"], kept_out)
    return Tokenizer.from_str(json.dumps(content))


def check_merges(tokenizer_json: str) -> None:
    """Raise ValueError for merges that the library ends the whole process at.

    It takes the prefix of pieces within a word off a merge's second part, and does not look whether
    that has it.
    """
    if not re.search(r'"continuing_subword_prefix"\s*:\s*"', tokenizer_json):
        return  # hardly any tokenizer has both, and reading all of it takes a while
    model = json.loads(tokenizer_json)["model"]
    prefix = model.get("continuing_subword_prefix")
    for merge in model.get("merges") or () if prefix else ():
        _, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if not right.startswith(prefix):
            raise ValueError("a merge within a word is without the prefix of such pieces")


def _rename(model: dict[str, Any], kept_out: Set[int]) -> None:
    """Rename pieces in place, and drop the merges that make them or are made with them."""
    chance = secrets.token_hex(16)
    vocab = model["vocab"]
    if isinstance(vocab, list):  # a unigram model lists its pieces with their scores
        for token_id in kept_out & set(range(len(vocab))):
            vocab[token_id][0] = f"{chance} {token_id}"
        return
    names = {piece: f"{chance} {i}" if i in kept_out else piece for piece, i in vocab.items()}
    model["vocab"] = {names[piece]: token_id for piece, token_id in vocab.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [m for m in model["merges"] if _is_possible(m, prefix, model["vocab"])]


def _is_possible(merge: str | list[str], prefix: int, vocab: dict[str, int]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in vocab and right in vocab and left + right[prefix:] in vocab
