"""Decodes token ids to text increments.

Uses the tokenizers library's streaming decoder. The library raises bare Exception for most errors.
A panic of its Rust code, such as for a regular expression that backtracks too far, is a
BaseException without an importable class. This module raises ModelError for both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvchat.core.errors import KvchatError, ModelError


def is_library_fault(error: BaseException) -> bool:
    """Return whether an error is the library's, including a panic, and not a signal or exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def faults_as_model_errors(sentence: str, hint: str = "") -> Iterator[None]:
    """Raise ModelError, with the sentence and the library's message, for any library error."""
    try:
        yield
    except KvchatError:
        raise
    except BaseException as error:
        if not is_library_fault(error):
            raise
        words = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelError(f"{sentence}: {words or type(error).__name__}.", hint) from error


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenStream:
    """Decodes token ids to text one by one, and never splits a character.

    Special tokens have no text, except thinking marks. `flush` returns the replacement text of an
    incomplete character at the end.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_ids: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        context = list(context_ids)
        if self._decode(context).endswith(_REPLACEMENT):
            context = []  # the library would return a context that ends in a character as new text
        self._stream = DecodeStream(ids=context, skip_special_tokens=False)
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except BaseException as error:
            if not is_library_fault(error):
                raise
            # The library raises a bare Exception if the text it returned before has changed: a byte
            # that was a character alone is now part of a malformed one.
            self._stream = DecodeStream(ids=[token_id], skip_special_tokens=False)
            return self.flush()
        if text is None:
            return ""
        self._pending.clear()
        return str(text)

    def flush(self) -> str:
        """Return the replacement text of an incomplete character at the end, if there is one."""
        text = self._decode(self._pending)
        self._pending.clear()
        return text

    def _decode(self, token_ids: list[int]) -> str:
        """Return the ids' text, a replacement character if the tokenizer fails.

        A failure must not end the answer.
        """
        try:
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        except BaseException as error:
            if not is_library_fault(error):
                raise
            return _REPLACEMENT
