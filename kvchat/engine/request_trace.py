"""RequestTrace: a line for each request in a file, for `kvchat bench trace`; hashes, no text.

A hash stands for 256 tokens and all before them. It is keyed with random bytes that stay in the
memory of this machine, so that a file which is passed on does not tell whether a known text was
read. Requests of incognito chats are not noted: these have no trace.
"""

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from kvchat.cache.keys import encode_ids
from kvchat.core.types import Memory, Timing, TokenIds, Usage

BLOCK_TOKENS = 256
_HASH_BYTES = 8
_KEY_BYTES = 32
_KEY = ("request trace", "key")
_HEAD = {"kvchat_trace": 1, "block_tokens": BLOCK_TOKENS}

_log = logging.getLogger(__name__)


class RequestTrace:
    """Appends to the file at `path`, mode 0600. `root` names the model and its KV.

    A file that cannot be written is said in the log, once, and then left alone.
    """

    def __init__(
        self, path: Path, root: bytes, memory: Memory, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._root = root
        self._key = _key(memory)
        self._clock = clock
        self._has_failed = False

    def note(self, ids: TokenIds, usage: Usage, timing: Timing, is_one_shot: bool) -> None:
        """Append a request that ended: `ids` of its prompt and answer whose KV was computed."""
        if self._has_failed:
            return
        record = {
            "time_s": round(self._clock() - timing.total_s, 3),
            "prompt_tokens": usage.prompt_tokens,
            "answer_tokens": usage.completion_tokens,
            "blocks": self._hashes(ids),
            **({"one_shot": True} if is_one_shot else {}),
            "found": usage.cached.as_dict(),
            "first_token_s": round(timing.ttft_s, 4),
        }
        try:
            self._append(record)
        except OSError as error:
            self._has_failed = True
            _log.warning("no trace is written: %s", error)

    def _hashes(self, ids: TokenIds) -> list[str]:
        before, hashes = self._root, []
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = encode_ids(ids[start : start + BLOCK_TOKENS])
            before = hashlib.blake2b(
                before + block, digest_size=_HASH_BYTES, key=self._key
            ).digest()
            hashes.append(before.hex())
        return hashes

    def _append(self, record: dict[str, object]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            lines = [record] if os.fstat(file.fileno()).st_size else [_HEAD, record]
            file.write("".join(json.dumps(line) + "\n" for line in lines))


def _key(memory: Memory) -> bytes:
    """Return the key of this machine's hashes; a new one where the memory has none."""
    memory.update(*_KEY, lambda fact: fact if _is_key(fact) else secrets.token_hex(_KEY_BYTES))
    fact = memory.get(*_KEY)
    return bytes.fromhex(str(fact)) if _is_key(fact) else secrets.token_bytes(_KEY_BYTES)


def _is_key(fact: object) -> bool:
    try:
        return isinstance(fact, str) and len(bytes.fromhex(fact)) == _KEY_BYTES
    except ValueError:
        return False
