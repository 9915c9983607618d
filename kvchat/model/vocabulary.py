"""Do two checkpoints mean the same tokens by the same ids?

Compares what their tokenizers write down. Tokenises nothing.
"""

import json

from kvchat.core.errors import ModelError
from kvchat.model.source import ModelSource
from kvchat.model.text_files import read_text_files

# A vocabulary may be padded, or lack another's latest control tokens, but no more than this of it.
_LEAST_SHARED = 0.9


def same_vocabulary(first: ModelSource, second: ModelSource) -> bool:
    """Whether no id means different tokens to the two, and nearly all ids are known to both.

    Raises ModelError where one has no usable tokenizer.
    """
    first_text = read_text_files(first).tokenizer_json
    second_text = read_text_files(second).tokenizer_json
    if first_text == second_text:
        return True
    ours, theirs = _tokens_of(first, first_text), _tokens_of(second, second_text)
    shared = ours.keys() & theirs.keys()
    if any(ours[token_id] != theirs[token_id] for token_id in shared):
        return False
    return len(shared) >= _LEAST_SHARED * max(len(ours), len(theirs))


def _tokens_of(source: ModelSource, tokenizer_json: str) -> dict[int, str]:
    try:
        return _tokens(tokenizer_json)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"tokenizer.json of {source.name} has no vocabulary that can be compared.",
            "Use another draft model, or none.",
        ) from error


def _tokens(tokenizer_json: str) -> dict[int, str]:
    """Return every id's token, the added ones included."""
    content = json.loads(tokenizer_json)
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {token_id: token for token, token_id in vocabulary.items()}
    else:  # a unigram model lists tokens with their scores
        tokens = {token_id: entry[0] for token_id, entry in enumerate(vocabulary)}
    return tokens | {entry["id"]: entry["content"] for entry in content["added_tokens"]}
