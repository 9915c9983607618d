"""TextCodec: the tokenizer as a chat uses it, in this process or in a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvchat.chat.text_stream import TextStream

if TYPE_CHECKING:
    from kvchat.chat.grammar import Grammars

# Characters of a text up to which it is encoded as a whole.
LONG_TEXT = 1 << 16


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. Text of an inert segment never becomes a control token."""

    text: str
    is_inert: bool = False


class TextCodec(Protocol):
    """Text to ids and back, as a chat uses it. `ChatTokenizer` says what each call does."""

    stop_token_ids: frozenset[int]

    @property
    def digest(self) -> str: ...

    @property
    def grammars(self) -> "Grammars": ...

    def encode(self, segments: Sequence[Segment]) -> list[int]: ...

    def encode_after(self, last_id: int | None, segments: Sequence[Segment]) -> list[int]: ...

    def encode_front(self, text: str, most: int) -> list[int]: ...

    def encode_raw(self, text: str) -> list[int]: ...

    def exceeds(self, text: str, limit: int) -> bool: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def new_stream(self, context_ids: Sequence[int]) -> TextStream: ...

    def token_id(self, token: str) -> int | None: ...

    def is_hidden(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...
