"""ChatTokenizer: text to token ids and back, with control tokens only where a template wrote them.

Knows the tokenizers library. Does not know templates or conversations.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from kvchat.chat.detokenizer import TokenStream
from kvchat.chat.thinking import CHANNEL_TOKEN, CHANNEL_TOKENS, THINKING_MARKS
from kvchat.core.errors import ModelError
from kvchat.model.text_files import TextFiles


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. In an inert one nothing is a control token, whatever it spells."""

    text: str
    is_inert: bool = False


class ChatTokenizer:
    """One checkpoint's tokenizer. Safe to share between threads once made."""

    def __init__(self, files: TextFiles) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception for malformed files
            raise ModelError("The checkpoint's tokenizer.json cannot be read.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._json = files.tokenizer_json
        self._bos = files.special_tokens.get("bos_token") if files.adds_bos else None
        self._control = _control_ids(self._tokenizer, files)
        self._hidden = _hidden_ids(self._tokenizer, files.chat_template or "")
        self.stop_token_ids = self._stop_ids(files)

    def _stop_ids(self, files: TextFiles) -> frozenset[int]:
        ids = set(files.stop_token_ids)
        eos = files.special_tokens.get("eos_token")
        if eos is not None and (token_id := self.token_id(eos)) is not None:
            ids.add(token_id)
        return frozenset(ids)

    @cached_property
    def digest(self) -> str:
        """Names the tokenizer: ids mean the same text only under the same digest."""
        return f"t1-{hashlib.sha256(self._json.encode()).hexdigest()[:16]}"

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact text."""
        token_id = self._tokenizer.token_to_id(token)
        return int(token_id) if token_id is not None else None

    def is_control(self, token_id: int) -> bool:
        """Tell whether an id is a control token, by the tokenizer's or the template's word."""
        return token_id in self._control

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of a prompt's segments, without adding any special tokens.

        Encoded in one piece where that gives no control tokens but those of the segments that are
        not inert, so that the ids are those of the whole text; else segment by segment.
        """
        ids = self._encode("".join(segment.text for segment in segments))
        meant = [i for s in segments if not s.is_inert for i in self._encode(s.text)]
        if list(filter(self.is_control, ids)) == list(filter(self.is_control, meant)):
            return ids
        return [
            token
            for s in segments
            for token in (self._encode_inert(s.text) if s.is_inert else self._encode(s.text))
        ]

    def encode_bare(self, text: str, is_first: bool) -> list[int]:
        """Return the ids of inert text with no template around it.

        The first text of a context gets what the tokenizer adds by default, a BOS for example.
        """
        if any(map(self.is_control, self._encode(text))):
            ids = self._encode("", adds_special=is_first) + self._encode_inert(text)
        else:
            ids = self._encode(text, adds_special=is_first)
        bos_id = self.token_id(self._bos) if self._bos is not None else None
        if is_first and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        visible = [token for token in token_ids if token not in self._hidden]
        return str(self._tokenizer.decode(visible, skip_special_tokens=False))

    def new_stream(self, context_ids: Sequence[int]) -> TokenStream:
        """Return a decoder for the ids that follow `context_ids`."""
        return TokenStream(self._tokenizer, context_ids[-8:], self._hidden)

    def _encode(self, text: str, adds_special: bool = False) -> list[int]:
        return _encode_with(self._tokenizer, text, adds_special)

    def _encode_inert(self, text: str) -> list[int]:
        ids = _encode_with(self._plain, text)
        if not any(map(self.is_control, ids)):
            return ids
        # A unigram vocabulary can hold a control token as an ordinary piece: take it apart.
        return [token for char in text for token in _encode_with(self._plain, char)]

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer without added tokens.

        None of them may stay: the library numbers those beyond the vocabulary anew.
        """
        content = {**json.loads(self._json), "added_tokens": []}
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def _encode_with(tokenizer: Tokenizer, text: str, adds_special: bool = False) -> list[int]:
    # What the terminal could not decode arrives as lone surrogates, which no tokenizer takes.
    text = text.encode("utf-8", errors="replace").decode()
    return list(tokenizer.encode(text, add_special_tokens=adds_special).ids)


def _control_ids(tokenizer: Tokenizer, files: TextFiles) -> frozenset[int]:
    """Return the tokens that steer a model: special ones, and those its template writes.

    Added tokens that are neither, such as runs of spaces or HTML tags, are ordinary text, and so is
    the token for unknown characters.
    """
    template, unknown = files.chat_template or "", files.special_tokens.get("unk_token")
    model = json.loads(files.tokenizer_json).get("model", {})
    ordinary = {unknown, model.get("unk_token")}
    return frozenset(
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.content.strip()
        and token.content not in ordinary
        and token_id != model.get("unk_id")
        and (token.special or token.content in template)
    )


def _hidden_ids(tokenizer: Tokenizer, template: str) -> frozenset[int]:
    """Return the special tokens a reader never sees; marks of thinking are part of the text."""
    shown = {*THINKING_MARKS.keys(), *THINKING_MARKS.values()}
    if CHANNEL_TOKEN in template:
        shown |= CHANNEL_TOKENS
    return frozenset(
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content not in shown
    )
