"""Grammars: limits the text of answers to a grammar, with the library llguidance.

The library is imported when the first grammar is compiled.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvchat.chat.text_stream import TextStream
from kvchat.chat.thinking import ThinkingSplitter
from kvchat.chat.tools import limits_of
from kvchat.core.errors import UsageError
from kvchat.core.types import TokenConstraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between two parts of JSON: a space, or a new line and its indentation. Where JSON allows any white
# space, some models write nothing else until their last token.
_SPACE = r" |\n {0,24}|\n\t{0,8}"
_MOST_REASON = 300


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON text that a JSON schema describes."""
    return json.dumps({"grammars": [{"json_schema": spaced(schema)}]})


def spaced(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what limits a JSON text by a schema, and what it may have between two parts."""
    return {**limits_of(schema), "x-guidance": {"whitespace_pattern": _SPACE, "lenient": False}}


class Grammars:
    """Compiles grammars for the vocabulary of one tokenizer, given as its JSON text.

    One thread at a time uses it.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        self._vocabularies: dict[frozenset[int], LLTokenizer] = {}

    def compile(self, grammar: str, stop_ids: frozenset[int]) -> "Grammar":
        """Return a grammar, in the form of llguidance, for answers that `stop_ids` end.

        Raises UsageError for a grammar that is wrong or cannot be followed, and for a tokenizer
        whose tokens have no bytes.
        """
        from llguidance import LLMatcher

        vocabulary = self._vocabulary(stop_ids)
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        first = matcher.deep_copy()  # a schema may be right and describe nothing
        is_possible = not matcher.is_error() and any(first.compute_bitmask())
        if not is_possible or first.is_error():
            bad = matcher if matcher.is_error() else first
            raise UsageError(f"It cannot be followed: {_reason(bad)}.")
        return Grammar(matcher, vocabulary, stop_ids)

    def _vocabulary(self, stop_ids: frozenset[int]) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if stop_ids not in self._vocabularies:
            try:
                made = LLTokenizer(self._json, eos_token=sorted(stop_ids))
            except (ValueError, TypeError) as error:
                raise UsageError(
                    "Answers of this model cannot follow a format: "
                    f"{str(error).splitlines()[0][:_MOST_REASON].rstrip('.')}."
                ) from error
            self._vocabularies[stop_ids] = made
        return self._vocabularies[stop_ids]


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar for one model."""

    _matcher: "LLMatcher"
    _vocabulary: "LLTokenizer"
    _stop_ids: frozenset[int]

    def begun(self, said: str) -> "Grammar":
        """Return the grammar of what may follow a text; raises UsageError if nothing may."""
        if not said:
            return self
        matcher = self._matcher.deep_copy()
        tokens = self._vocabulary.tokenize_str(said)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            raise UsageError("The answer to continue does not match the format.")
        return Grammar(matcher, self._vocabulary, self._stop_ids)

    def constraint(self, thinking: TextStream | None = None) -> TokenConstraint:
        """Return what limits the tokens of one answer.

        thinking   decodes the answer if it begins within thinking: the constraint applies after it
        """
        follows = _Follows(self._matcher.deep_copy(), self._vocabulary, self._stop_ids)
        return follows if thinking is None else _ThinksFirst(follows, thinking)


@dataclass(frozen=True, slots=True, eq=False)
class _Follows:
    """Follows a grammar from the first token on. Owns the matcher."""

    _matcher: "LLMatcher"
    _vocabulary: "LLTokenizer"
    _stop_ids: frozenset[int]

    def allowed(self) -> bytes:
        """Return the bits; the tokens that end an answer are allowed once it is complete.

        They are never text, also where the tokenizer does not call them special.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token_id: int) -> bool:
        self._matcher.consume_token(token_id)
        self._check()
        return self._matcher.is_stopped()

    def accept_text(self, text: str) -> None:
        self._matcher.consume_tokens(self._vocabulary.tokenize_str(text))
        self._check()

    def anything(self) -> bytes:
        """Return the bits of all tokens that do not end an answer."""
        size = self._vocabulary.vocab_size
        return _without(b"\xff" * ((size + 7) // 8), self._stop_ids)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _reason(self._matcher)
            raise UsageError(f"The answer could not follow its format: {reason}.")


class _ThinksFirst:
    """Allows any text until thinking ends, and then what follows a grammar."""

    def __init__(self, follows: _Follows, stream: TextStream) -> None:
        self._follows = follows
        self._stream = stream
        self._splitter = ThinkingSplitter(starts_thinking=True)

    def allowed(self) -> bytes:
        return self._follows.anything() if self._splitter.is_thinking else self._follows.allowed()

    def accept(self, token_id: int) -> bool:
        if not self._splitter.is_thinking:
            return self._follows.accept(token_id)
        passages = self._splitter.feed(self._stream.feed(token_id))
        # A token may hold the end of the mark and the beginning of the answer.
        answer = "".join(passage.text for passage in passages if not passage.is_thinking)
        if answer:
            self._follows.accept_text(answer)
        return False


class AtLeast:
    """Lets nothing end an answer before it has `num_tokens`; `then` limits its tokens besides.

    An answer that can only end ends all the same. `vocab_size` ids are below it.
    """

    def __init__(
        self,
        num_tokens: int,
        stop_ids: frozenset[int],
        vocab_size: int,
        then: TokenConstraint | None,
    ) -> None:
        self._num_left = num_tokens
        self._stop_ids = stop_ids
        self._all = b"\xff" * ((vocab_size + 7) // 8)
        self._then = then

    def allowed(self) -> bytes | None:
        bits = self._then.allowed() if self._then is not None else None
        if self._num_left <= 0:
            return bits
        others = _without(self._all if bits is None else bits, self._stop_ids)
        return others if any(others) else bits

    def accept(self, token_id: int) -> bool:
        self._num_left -= 1
        return self._then.accept(token_id) if self._then is not None else False


def _without(bits: bytes, token_ids: frozenset[int]) -> bytes:
    changed = bytearray(bits)
    for token_id in token_ids:
        if token_id // 8 < len(changed):
            changed[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(changed)


def _reason(matcher: "LLMatcher") -> str:
    """Return the first line of the library's message; later lines may hold the whole grammar."""
    lines = matcher.get_error().strip().splitlines() or ["the library does not say why"]
    return lines[0][:_MOST_REASON].rstrip(".")
