"""TextFiles: the text settings of a checkpoint, of whichever format its files are."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """A tokenizer that was built of another file than a tokenizer.json.

    `digest` is that of all that it was built of, and of the rules that it was built by.
    """

    tokenizer: "Tokenizer"
    digest: str


# To be raised when builders spell the pieces of the same file otherwise.
_SPELLING = b"1"


def built_tokenizer(tokenizer: "Tokenizer", parts: Iterable[bytes]) -> BuiltTokenizer:
    """Return a tokenizer that was built of `parts`, which may be any."""
    rules = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder
    states = (b"" if rule is None else bytes(rule.__getstate__()) for rule in rules)
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    digest = hashlib.sha256()
    for part in (_SPELLING, *states, json.dumps(added, sort_keys=True).encode(), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return BuiltTokenizer(tokenizer, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The text settings of a checkpoint.

    vocabulary          the content of tokenizer.json, or the tokenizer that another file gave
    chat_template       Jinja source, None if the checkpoint has none
    special_tokens      strings by the template's variable name: bos_token, eos_token and so on
    stop_token_ids      the ids that end a completion, by its configuration
    sampling_defaults   the author's sampling parameters, by SamplingParams' names
    adds_bos            whether a bare prompt starts with BOS, by its tokenizer configuration
    max_context         the most tokens of a context, None if its configuration does not state it
    vocab_size          the number of ids with an embedding, None if not stated
    """

    vocabulary: str | BuiltTokenizer
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    adds_bos: bool = False
    max_context: int | None = None
    vocab_size: int | None = None

    def tokenizer(self) -> "Tokenizer":
        """Return the tokenizer. Reading a large tokenizer.json takes a second.

        Raises plain Exception if it is not valid. A chat on a server has the settings without the
        library.
        """
        from tokenizers import Tokenizer

        if isinstance(self.vocabulary, BuiltTokenizer):
            return self.vocabulary.tokenizer
        return Tokenizer.from_str(self.vocabulary)

    @property
    def tokenizer_json(self) -> str:
        """The content of tokenizer.json. Writing that of a built tokenizer takes half a second."""
        if isinstance(self.vocabulary, BuiltTokenizer):
            return str(self.vocabulary.tokenizer.to_str())
        return self.vocabulary

    @property
    def digest(self) -> str:
        """The SHA-256 of what the tokenizer is made of, and how, in hexadecimal digits."""
        if isinstance(self.vocabulary, BuiltTokenizer):
            return self.vocabulary.digest
        return hashlib.sha256(self.vocabulary.encode()).hexdigest()
