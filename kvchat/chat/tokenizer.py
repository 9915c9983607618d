"""ChatTokenizer: text to token ids and back. Only a template's text may give control tokens."""

import base64
import json
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from typing import Any

from tokenizers import Encoding, Tokenizer, models, pre_tokenizers

from kvchat.chat.detokenizer import TokenStream, faults_as_model_errors
from kvchat.chat.grammar import Grammars
from kvchat.chat.text_codec import LONG_TEXT, Segment
from kvchat.chat.thinking import CHANNEL_TOKEN, CHANNEL_TOKENS, THINKING_MARKS
from kvchat.chat.tool_calls import CALL_TOKENS
from kvchat.model.files.text_settings import TextFiles

# A tokenizer.json is a stranger's program, and it runs in this process, millions of times. So what
# it can make is bounded when it is read, from its steps. A search of its regular expressions ends
# by itself: the library gives up after ten million tries.

# Bounds of characters for one character. The first is refused when it may be; of a text that might
# grow by the second, it is measured.
_MOST_GROWTH, _PLAIN_GROWTH = 1024.0, 8.0
# The bytes that Unicode's own normalization makes of one character at most, rounded up.
_UNICODE_BYTES = 40
# Characters or ids that are added once to a text, or to each word.
_MOST_ADDED, _MOST_AFFIX = 1000, 64
_MEASURED_CHARACTERS = 4096

Step = Mapping[str, Any]


def check_limits(tokenizer: Tokenizer) -> Callable[[str], None] | None:
    """Return a check of texts, where some text might grow; None where none can.

    Raises ValueError for a tokenizer that may multiply texts without end. So does the check, for a
    text that it multiplies.
    """
    grown, added = _growth(_steps(tokenizer.normalizer, "normalizers"))
    words = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    by_words = 2.0 ** sum(step["type"] in ("ByteLevel", "Metaspace") for step in words)
    decoded, _ = _growth(_steps(tokenizer.decoder, "decoders"))
    if max(grown, decoded) > _MOST_GROWTH or by_words > _PLAIN_GROWTH or added > _MOST_ADDED:
        raise ValueError("it multiplies the text that it is given")
    if _num_added_ids(_steps(tokenizer.post_processor, "processors")) > _MOST_ADDED:
        raise ValueError("it adds thousands of tokens to a text")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(tokenizer.model, name, None) or "") > _MOST_AFFIX:
            raise ValueError("it adds a long text to every word")
    return _check_of_texts(tokenizer) if grown > _PLAIN_GROWTH else None


def _check_of_texts(tokenizer: Tokenizer) -> Callable[[str], None]:
    def check(text: str) -> None:
        grown = 0
        for start in range(0, len(text), _MEASURED_CHARACTERS):
            piece = text[start : start + _MEASURED_CHARACTERS]
            grown += len(tokenizer.normalizer.normalize_str(piece)) if tokenizer.normalizer else 0
            if grown > _PLAIN_GROWTH * len(text) + _MOST_ADDED:
                raise ValueError("it multiplies the text that it is given")

    return check


def _steps(part: Any, name: str) -> list[Step]:
    """Return the steps of a part of a tokenizer in order, none without that part."""
    return list(_flat(json.loads(part.__getstate__()), name)) if part is not None else []


def _flat(step: Step, name: str) -> Iterator[Step]:
    if step["type"] == "Sequence":
        for inner in step[name]:
            yield from _flat(inner, name)
    else:
        yield step


def _growth(steps: Sequence[Step]) -> tuple[float, float]:
    """Return how many characters steps make of one at most, and how many they add once.

    From the last step to the first: a character weighs as much as what the later steps make of it.
    """
    weights: dict[str, float] = {}
    rest, added = 1.0, 0.0  # of all characters that are not in `weights`
    for step in reversed(steps):
        kind, most = step["type"], max(rest, *weights.values(), 0.0)
        if kind == "Replace":
            made = sum(weights.get(character, rest) for character in step["content"])
            if old := step["pattern"].get("String"):
                share = made / len(old)
                weights |= {c: max(weights.get(c, rest), share) for c in old}
            else:  # an expression may match one character, or none between any two
                weights = {c: weight + made for c, weight in weights.items()}
                rest += made
        elif kind == "Prepend":
            added += sum(weights.get(character, rest) for character in step["prepend"])
        else:  # any character may become any other
            weights, rest = {}, most * _growth_of(kind, step)
    return max(rest, *weights.values(), 0.0), added


def _growth_of(kind: str, step: Step) -> float:
    if kind == "Precompiled":
        return max(1.0, _longest_replacement(step) / _UNICODE_BYTES)
    return 2.0 if kind == "ByteLevel" else 1.0


def _longest_replacement(step: Step) -> int:
    """Return the bytes of the longest text in a table of characters, as sentencepiece writes it."""
    table = base64.b64decode(step["precompiled_charsmap"])
    if len(table) < 4:
        return 0
    (index_bytes,) = struct.unpack("<I", table[:4])
    return max(map(len, table[4 + index_bytes :].split(b"\0")))


def _num_added_ids(steps: Sequence[Step]) -> int:
    """Return how many ids the templates of post-processors add to a text."""
    count = 0
    for step in steps:
        tokens = step.get("special_tokens") or {}
        for piece in step.get("single") or ():
            token = tokens.get(piece.get("SpecialToken", {}).get("id"), {})
            count += len(token.get("ids", ()))
    return count


# Roles of the special tokens that control a model. Padding is not one: nothing is padded here.
_STEERING = ("bos_token", "eos_token", "sep_token", "cls_token")

# Decoders that write each token's bytes behind those before, whatever these are.
_JOINING = frozenset({"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"})
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_MOST_IDS = 2**32  # the library's ids have 32 bits
# Bounds memory: the library uses about 500 bytes for each byte of a text.
_PIECE_CHARACTERS = LONG_TEXT


class TokenBytes:
    """The bytes of one tokenizer's tokens, as its decoder writes them within a text.

    One token may be part of a character.
    """

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

    @property
    def are_whole(self) -> bool:
        """Whether the decoder only joins the tokens' bytes, but at the beginning of a text."""
        replaced = [step for step in self._decoders if step["type"] == "Replace"]
        is_each_alone = all(len(step["pattern"].get("String", "")) == 1 for step in replaced)
        return bool(self._kinds) and self._kinds <= _JOINING and is_each_alone

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
    def _decoders(self) -> list[Step]:
        return _steps(self._tokenizer.decoder, "decoders")

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


class ChatTokenizer:
    """One checkpoint's tokenizer. Thread-safe after construction.

    Encoding and decoding raise ModelError if the tokenizer fails on a text.
    """

    def __init__(self, files: TextFiles) -> None:
        with faults_as_model_errors("The checkpoint's tokenizer.json cannot be read"):
            if isinstance(files.vocabulary, str):
                check_merges(files.vocabulary)
            self._tokenizer = files.tokenizer()
            self._check_text = check_limits(self._tokenizer)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._files = files
            self._added = frozenset(self._tokenizer.get_added_tokens_decoder())
            self._bos = files.special_tokens.get("bos_token") if files.adds_bos else None
            self.stop_token_ids = self._stop_ids(files)
            steering, self._reserved = _reserved_ids(self._tokenizer, files, self.stop_token_ids)
            # An unknown character may give the unknown token, unless that is a control token too.
            self._control = self._reserved - (_unknown_ids(self._tokenizer, files) - steering)
            self.hidden_ids = _hidden_ids(self._tokenizer, files.chat_template or "")

    def _stop_ids(self, files: TextFiles) -> frozenset[int]:
        ids = set(files.stop_token_ids)
        eos = files.special_tokens.get("eos_token")
        if eos is not None and (token_id := self.token_id(eos)) is not None:
            ids.add(token_id)
        return frozenset(ids)

    @cached_property
    def digest(self) -> str:
        """Identifies the tokenizer: equal digests mean that ids stand for the same text."""
        return f"t1-{self._files.digest[:16]}"

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact text."""
        token_id = self._tokenizer.token_to_id(token)
        return int(token_id) if token_id is not None else None

    def is_control(self, token_id: int) -> bool:
        """Return whether an id is a control token, in the tokenizer or in the template."""
        return token_id in self._control

    @cached_property
    def reserved_texts(self) -> re.Pattern[str]:
        """Matches the text of any token that inert text must not become."""
        texts = {self._tokenizer.id_to_token(i) or "" for i in self._reserved}
        return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len)[::-1] if t) or "$^")

    def is_hidden(self, token_id: int) -> bool:
        """Return whether a token is never displayed."""
        return token_id in self.hidden_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, perhaps a part of a character."""
        return self._bytes.of(token_id)

    @property
    def is_bytewise(self) -> bool:
        """Whether a text within an answer is its tokens' bytes in a row."""
        return self._bytes.are_whole

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars for this vocabulary."""
        return Grammars(self._tokenizer.to_str())

    def encode(self, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of a prompt's segments, without adding any special tokens.

        The joined text is encoded as one piece if its reserved tokens are exactly those of the
        segments that are not inert. Otherwise inert text is encoded without reserved tokens.
        """
        ids = self._encode("".join(segment.text for segment in segments)).ids
        meant = [i for s in segments if not s.is_inert for i in self._encode(s.text).ids]
        if _among(ids, self._reserved) == _among(meant, self._reserved):
            return ids
        spelled = self._spell(segments)
        # If both differ from `meant` in the same way, it is the unknown token, for characters
        # that the vocabulary lacks.
        is_same = _among(ids, self._reserved) == _among(spelled, self._reserved)
        return ids if is_same else spelled

    def encode_after(self, last_id: int | None, segments: Sequence[Segment]) -> list[int]:
        """Return the ids of segments that continue a context which ends with `last_id`.

        Some tokenizers put a space before a text, which must not happen within one.
        """
        if last_id is None:
            return self.encode(segments)
        with faults_as_model_errors("The checkpoint's tokenizer cannot decode"):
            end = Segment(str(self._tokenizer.decode([last_id], skip_special_tokens=False)))
        before, whole = self.encode([end]), self.encode([end, *segments])
        if before[-1:] == [last_id] and whole[: len(before)] == before:
            return whole[len(before) :]
        return self.encode(segments)  # both are one token together, or the id alone is no text

    def encode_bare(self, text: str, is_first: bool) -> list[int]:
        """Return the ids of inert text with no template around it.

        With `is_first` the tokens that the tokenizer puts before a text by default, such as BOS,
        come first.
        """
        ids = self.encode([Segment(text, is_inert=True)])
        return [*self._front, *ids] if is_first else ids

    def encode_raw(self, text: str) -> list[int]:
        """Return the ids of a whole context that is given as text, control tokens included.

        The tokens that the tokenizer puts before a text by default come first.
        """
        ids = self.encode([Segment(text)])
        return ids if ids[: len(self._front)] == self._front else [*self._front, *ids]

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a long text certainly has more than `limit` tokens.

        It does not encode the whole text: the limit bounds memory and time. False if that is not
        certain without encoding all of it.
        """
        if len(text) <= max(4 * limit, _PIECE_CHARACTERS):
            return False
        # Each cut adds a few tokens, but far less than twice as many in total.
        return len(self.encode_front(text, 2 * limit)) > 2 * limit

    def encode_front(self, text: str, most: int) -> list[int]:
        """Return the ids of inert text, encoded in pieces until there are more than `most` ids.

        At the ends of pieces they may differ from the ids of the whole text.
        """
        ids: list[int] = []
        for start in range(0, len(text), _PIECE_CHARACTERS):
            if len(ids) > most:
                break
            piece = text[start : start + _PIECE_CHARACTERS]
            ids += self.encode([Segment(piece, is_inert=True)])
        return ids

    @cached_property
    def _front(self) -> list[int]:
        """The ids that begin a context without a template."""
        encoding = self._encode("x", adds_special=True)
        masked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        front = [token_id for token_id, _ in takewhile(itemgetter(1), masked)]
        bos_id = self.token_id(self._bos) if self._bos is not None else None
        return [bos_id, *front] if bos_id is not None and front[:1] != [bos_id] else front

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens that are hidden from the user."""
        visible = [token for token in token_ids if token not in self.hidden_ids]
        with faults_as_model_errors("The checkpoint's tokenizer cannot decode"):
            return str(self._tokenizer.decode(visible, skip_special_tokens=False))

    def new_stream(self, context_ids: Sequence[int]) -> TokenStream:
        """Return a decoder for the ids that follow `context_ids`."""
        return TokenStream(self._tokenizer, context_ids[-8:], self.hidden_ids)

    def _encode(self, text: str, adds_special: bool = False) -> Encoding:
        return self._encode_with(self._tokenizer, text, adds_special)

    def _encode_with(self, tokenizer: Tokenizer, text: str, adds_special: bool = False) -> Encoding:
        # Undecodable terminal input arrives as lone surrogates, which tokenizers refuse.
        text = text.encode("utf-8", errors="replace").decode()
        with faults_as_model_errors(
            "The checkpoint's tokenizer cannot encode this text",
            "Use other words or another model.",
        ):
            if self._check_text is not None:
                self._check_text(text)
            return tokenizer.encode(text, add_special_tokens=adds_special)

    def _spell(self, segments: Sequence[Segment]) -> list[int]:
        """Return ids in which added and reserved tokens come only from segments that are not inert.

        All text between two such tokens is encoded as one piece, as the library does it.
        """
        ids: list[int] = []
        text = ""
        for segment in segments:
            if segment.is_inert:
                text += segment.text
                continue
            done = 0
            for token_id, begin, end in self.written(segment.text):
                ids += [*self._encode_plain(text + segment.text[done:begin]), token_id]
                text, done = "", end
            text += segment.text[done:]
        return ids + self._encode_plain(text)

    def written(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield (id, begin, end) of the added and reserved tokens in a template's text."""
        encoding = self._encode(text)
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._added or token_id in self._reserved:
                yield token_id, begin, end

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._encode_with(self._plain, text).ids
        # An unknown character still gives a control token where the unknown token is one.
        return [token_id for token_id in ids if token_id not in self._control]

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer, but no text is encoded as a reserved token."""
        with faults_as_model_errors("The checkpoint's tokenizer has no plain twin"):
            return plain_tokenizer(self._files.tokenizer_json, self._reserved)


def _among(token_ids: Iterable[int], wanted: Set[int]) -> list[int]:
    return [token_id for token_id in token_ids if token_id in wanted]


def _reserved_ids(
    tokenizer: Tokenizer, files: TextFiles, stop_ids: Set[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids that control a model, and all ids that inert text must not become.

    The second set is the first plus all special tokens. Other added tokens, such as HTML tags, are
    ordinary text. So are white space and single characters, even if they end answers: text cannot
    be written without them.
    """
    template = files.chat_template or ""
    added = tokenizer.get_added_tokens_decoder()
    named = {tokenizer.token_to_id(files.special_tokens.get(role, "")) for role in _STEERING}
    written = {i for i, token in added.items() if token.content and token.content in template}
    special = {token_id for token_id, token in added.items() if token.special}
    known = {i for i in named | stop_ids | written if i is not None and 0 <= i < _MOST_IDS}
    steering = frozenset(i for i in known if not _is_letter(tokenizer, i, i in added))
    others = (special | _unknown_ids(tokenizer, files)) - known
    letters = {i for i in others if _is_letter(tokenizer, i, i in added)}
    return steering, steering | (others - letters)


def _is_letter(tokenizer: Tokenizer, token_id: int, is_added: bool) -> bool:
    """Return whether text needs a token: white space, or a single ordinary character."""
    text = str(tokenizer.decode([token_id], skip_special_tokens=False)).strip()
    return not text if is_added else len(text) <= 1


def _unknown_ids(tokenizer: Tokenizer, files: TextFiles) -> set[int]:
    """Return the ids for unknown characters: the tokenizer's and the configuration's may differ."""
    names = {files.special_tokens.get("unk_token"), getattr(tokenizer.model, "unk_token", None)}
    ids = {tokenizer.token_to_id(name) for name in names if name is not None}
    if isinstance(tokenizer.model, models.Unigram):
        ids.add(json.loads(files.tokenizer_json)["model"].get("unk_id"))
    return {token_id for token_id in ids if token_id is not None}


def _hidden_ids(tokenizer: Tokenizer, template: str) -> frozenset[int]:
    """Return the special tokens that are never displayed; marks of thinking and calls stay."""
    shown = {*THINKING_MARKS.keys(), *THINKING_MARKS.values(), *CALL_TOKENS}
    if CHANNEL_TOKEN in template:
        shown |= CHANNEL_TOKENS
    return frozenset(
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special and token.content not in shown
    )


def plain_tokenizer(tokenizer_json: str, kept_out: Set[int]) -> Tokenizer:
    """Return the same tokenizer without added tokens, and without the pieces of ids `kept_out`.

    Such an id keeps its place under a random name that no text contains, so all other ids stay the
    same. An unknown character still gives the unknown token, even if that is in `kept_out`.
    """
    content = json.loads(tokenizer_json)
    # No added token may stay: the library renumbers those beyond the vocabulary.
    content |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    _rename(content["model"], kept_out)
    return Tokenizer.from_str(json.dumps(content))


def check_merges(tokenizer_json: str) -> None:
    """Raise ValueError for merges that make the library abort the whole process.

    The library removes the continuing-subword prefix from a merge's second part, and does not check
    that the part has the prefix.
    """
    if not re.search(r'"continuing_subword_prefix"\s*:\s*"', tokenizer_json):
        return  # few tokenizers have a prefix, and parsing the whole file is slow
    model = json.loads(tokenizer_json)["model"]
    prefix = model.get("continuing_subword_prefix")
    for merge in model.get("merges") or () if prefix else ():
        _, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if not right.startswith(prefix):
            raise ValueError("a merge within a word is without the prefix of such pieces")


def _rename(model: dict[str, Any], kept_out: Set[int]) -> None:
    """Rename pieces in place, and drop the merges that produce or use them."""
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
