"""PrivateHistory: what Up brings back, kept in a file by `chat/typed_lines.py`."""

from collections.abc import Callable, Collection, Iterable

from prompt_toolkit.history import History

from kvchat.chat.typed_lines import MAX_LINE_CHARS, Forgotten, TypedLine, TypedLines

Place = Callable[[], str | None]


class PrivateHistory(History):
    """History in a file; None, or an unusable file, keeps it until exit only.

    `place` returns the id of the open conversation. While it returns None, what is typed waits for
    the conversation that begins with it, for the file says where each line was typed: it is deleted
    with its conversation. `is_complete` is whether the file has, or will have, every entry so far.
    """

    def __init__(self, lines: TypedLines | None, place: Place = lambda: "") -> None:
        super().__init__()
        self._lines = lines
        self._place = place
        self._waiting: list[str] = []
        self._known: list[TypedLine] = []
        self._cleared: list[str] = []  # until exit
        self.is_complete = lines is not None

    def load_history_strings(self) -> Iterable[str]:
        """Yield the entries, the newest first."""
        self._known = self._lines.read() if self._lines is not None else []
        for line in reversed(self._known):
            yield line.text

    def store_string(self, string: str) -> None:
        """Append an entry to the file, or have it wait for its conversation."""
        if self._lines is None or len(string) > MAX_LINE_CHARS:
            self.is_complete = False
        else:
            self._waiting.append(string)
            self.settle()

    def store_cleared(self, string: str) -> None:
        """Add a text that is not sent. It is written only where it can be deleted with a
        conversation: Up brings others back until exit.
        """
        if self._place() is None:
            self._loaded_strings.insert(0, string)
            self._cleared.append(string)
        else:
            self.append_string(string)

    def settle(self, is_end: bool = False) -> None:
        """Write what waits, once it is known to which conversation it belongs, or at the end."""
        session_id = self._place()
        if self._lines is None or not self._waiting or (session_id is None and not is_end):
            return
        typed = [TypedLine(text, session_id or "") for text in self._waiting]
        self._waiting = []
        self._known += typed
        self.is_complete &= self._lines.add(typed)

    def forget(self, session_ids: Collection[str], texts: Collection[str]) -> None:
        """Let go of what belongs to conversations or messages; the file is changed elsewhere."""
        forgotten = Forgotten(session_ids, texts)
        known = [line for line in self._known if forgotten.has(line)]
        gone = {line.text for line in known}.union(self._cleared if session_ids else ())
        self._known = [line for line in self._known if line not in known]
        self._waiting = [text for text in self._waiting if text not in gone]
        self._loaded_strings = [
            text
            for text in self._loaded_strings
            if text not in gone and not forgotten.has_text(text)
        ]
