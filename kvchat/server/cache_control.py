"""Reads `cache_control`: the blocks of a message up to which the KV is to be kept for a while."""

from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat
from kvchat.server.api_errors import ApiError

_FIELD = "cache_control"
_MOST = 4
_TTLS_S = {"5m": 300.0, "1h": 3600.0}


class CacheMarks:
    """The marks of one request. Read the blocks in the order in which the model reads them."""

    def __init__(self, chat: IncomingChat) -> None:
        self._chat = chat
        self._num_marks = 0
        self._least_ttl_s = max(_TTLS_S.values())

    def read_all(self, holder: Fields, name: str) -> None:
        """Read the marks of a list of blocks; a field of another kind has none."""
        if isinstance(holder.raw(name), list):
            for block in holder.objects_if_any(name):
                self.read(block)

    def read_message(self, message: Fields, name: str) -> None:
        """Read the marks of the blocks of a message that was added; each ends with its block.

        One on the result of a tool reaches to where the text of the message begins.
        """
        if not isinstance(message.raw(name), list):
            return
        blocks = message.objects_if_any(name)
        texts = [block.text("text") or "" for block in blocks]
        has_text = any(texts)
        for number, block in enumerate(blocks, start=1):
            if _FIELD not in block:  # a text is joined for few blocks: a message may have thousands
                continue
            is_last = number == len(blocks) or block.text("type") == "tool_use"
            is_end = is_last or not has_text
            self.read(block, None if is_end else "".join(texts[:number]))

    def read(self, block: Fields, text: str | None = None) -> None:
        """Read the mark of a block that was added to the chat, if it has one.

        text   the beginning of the last message to which it reaches; None for its end

        Raises ApiError for a bad mark, for more than four, and for an hour after five minutes.
        """
        if _FIELD not in block:
            return
        mark = block.nested(_FIELD)
        if mark.text("type") != "ephemeral":
            raise mark.fault("type", "must be ephemeral")
        ttl_s = _TTLS_S.get(mark.text("ttl", "5m") or "")
        if ttl_s is None:
            raise mark.fault("ttl", f"must be {' or '.join(_TTLS_S)}")
        if ttl_s > self._least_ttl_s:
            raise mark.fault("ttl", "is longer than that of a block before it")
        self._num_marks += 1
        if self._num_marks > _MOST:
            sentence = f"More than {_MOST} blocks have {_FIELD}."
            raise ApiError(400, sentence, block.name_of(_FIELD), "invalid_value")
        self._least_ttl_s = ttl_s
        self._chat.keep_so_far(ttl_s, text)
