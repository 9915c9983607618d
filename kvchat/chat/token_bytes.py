"""TokenBytes: the bytes that each token adds to a text; one token may be part of a character."""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of one tokenizer's tokens, as its decoder writes them within a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id that the tokenizer does not have."""
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if "ByteLevel" in self._kinds:
            return bytes(self._byte_of[c] for c in piece if c in self._byte_of)
        byte = _BYTE_PIECE.fullmatch(piece) if "ByteFallback" in self._kinds else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for written, meant in self._replaced:
            piece = piece.replace(written, meant)
        if self._replaced:
            return piece.encode()
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False)).encode()

    @cached_property
    def _added(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items()}

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte that each character of a byte-level vocabulary stands for (GPT-2's order)."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        same = {c: ord(c) for c in alphabet if ord(c) < 256}
        others = (byte for byte in range(256) if byte not in same.values())
        return same | dict(zip((c for c in alphabet if ord(c) >= 256), others, strict=True))

    @cached_property
    def _decoders(self) -> list[dict[str, Any]]:
        decoder = self._tokenizer.decoder
        return list(_flat(json.loads(decoder.__getstate__()))) if decoder is not None else []

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(decoder["type"] for decoder in self._decoders)

    @cached_property
    def _replaced(self) -> list[tuple[str, str]]:
        """What the decoder replaces everywhere in a piece, such as the mark of a space."""
        pairs = []
        for decoder in self._decoders:
            if decoder["type"] == "Metaspace":
                pairs.append((decoder["replacement"], " "))
            elif decoder["type"] == "Replace" and "String" in decoder["pattern"]:
                pairs.append((decoder["pattern"]["String"], decoder["content"]))
        return pairs


def _flat(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for inner in decoder.get("decoders", ()):
        yield from _flat(inner)
