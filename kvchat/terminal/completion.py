"""Completes command names, their arguments, and @paths."""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import History

from kvchat.chat.typed_lines import MAX_LINE_CHARS, Forgotten, TypedLine, TypedLines
from kvchat.core.errors import UsageError
from kvchat.core.parameters import OF_ANSWERS
from kvchat.core.paths import user_path
from kvchat.core.text import one_line
from kvchat.terminal.commands import DAILY, Argument, Command, Registry
from kvchat.terminal.wrap import simple_emoji

_MAX_PATHS = 200
# The name that the cursor stands behind, of an argument or after @: it has spaces only within
# quotation marks.
_BEGUN = r'("[^"\n]*|[^\s"]\S*|)\Z'
_BEGUN_NAME = re.compile(rf"(?<!\S){_BEGUN}")
_BEGUN_MENTION = re.compile(rf"(?<!\S)@{_BEGUN}")

# Returns (text to insert, description) of the existing sessions or user messages.
Candidates = Callable[[], Iterable[tuple[str, str]]]


def _rank(command: Command) -> int:
    """Rank what is used most first, and /exit, the last of them, last; the rest keeps its order."""
    *by_use, last = DAILY
    if command.name == last:
        return 2 * len(by_use)
    return by_use.index(command.name) if command.name in by_use else len(by_use)


class LineCompleter(Completer):
    """Completes the line before the cursor; `candidates` are those of the kinds of arguments."""

    def __init__(self, registry: Registry, candidates: Mapping[Argument, Candidates]) -> None:
        self._registry = registry
        self._candidates: Mapping[Argument, Candidates] = {
            Argument.SETTING: lambda: ((p.dashed, p.help) for p in OF_ANSWERS),
            Argument.COMMAND: lambda: ((c.name, c.help) for c in registry.commands),
            **candidates,
        }

    def _of(self, kind: Argument) -> Iterable[tuple[str, str]]:
        return self._candidates[kind]() if kind in self._candidates else ()

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """Yield completions for the cursor's place."""
        return self._completions(document, lambda: self._of(Argument.SESSION))

    async def get_completions_async(
        self, document: Document, complete_event: CompleteEvent
    ) -> AsyncGenerator[Completion, None]:
        """Yield the same; the saved conversations are read on a thread, as they may be many."""
        sessions: tuple[tuple[str, str], ...] = ()
        if self._is_session_wanted(document):
            sessions = await asyncio.to_thread(lambda: tuple(self._of(Argument.SESSION)))
        for completion in self._completions(document, lambda: sessions):
            yield completion

    def _is_session_wanted(self, document: Document) -> bool:
        name, space, _ = document.text_before_cursor.removeprefix("/").partition(" ")
        command = self._registry.find(name) if space else None
        return command is not None and command.argument is Argument.SESSION

    def _completions(self, document: Document, sessions: Candidates) -> Iterator[Completion]:
        line = document.text_before_cursor
        if line.startswith("/") and "\n" not in line:
            name, space, rest = line[1:].partition(" ")
            if not space:
                yield from self._names(name)
                return
            command = self._registry.find(name)
            if command is not None:
                yield from self._arguments(command, rest, sessions)
                return
        yield from self._attachable(_BEGUN_MENTION.search(line))

    def _attachable(self, begun: re.Match[str] | None) -> Iterator[Completion]:
        """Yield pins and files for a name that is begun."""
        if begun is not None:
            yield from _words(self._of(Argument.PIN), begun[1])
            yield from _quoted_paths(begun[1])

    def _names(self, typed: str) -> Iterator[Completion]:
        for command in sorted(self._registry.commands, key=_rank):
            word = next((w for w in command.words if w.startswith(typed.lower())), None)
            if word is not None:
                shown = f"/{command.name}" if word == command.name else f"/{word} ({command.name})"
                yield Completion(word, -len(typed), display=shown, display_meta=command.help)

    def _arguments(
        self, command: Command, typed: str, sessions: Candidates
    ) -> Iterator[Completion]:
        if command.subcommands and " " not in typed:
            yield from _matching(((word, "") for word in command.subcommands), typed)
        kind = command.argument
        if kind is Argument.ATTACHABLE:
            yield from self._attachable(_BEGUN_NAME.search(typed))
        else:
            found = sessions() if kind is Argument.SESSION else self._of(kind)
            yield from _matching(found, typed)
        if kind in (Argument.PATH, Argument.MODEL):
            yield from _paths(typed.split(" ")[-1])


def _matching(candidates: Iterable[tuple[str, str]], typed: str) -> Iterator[Completion]:
    for text, meaning in candidates:
        if text.startswith(typed):
            yield Completion(text, -len(typed), display_meta=simple_emoji(one_line(meaning, 60)))


def _words(candidates: Iterable[tuple[str, str]], typed: str) -> Iterator[Completion]:
    """Yield names with the typed beginning, in quotation marks where they have spaces."""
    for name, meaning in candidates:
        word = name if name == "".join(name.split()) else f'"{name}"'
        if word.startswith(typed) or name.startswith(typed):
            yield Completion(word, -len(typed), display=name, display_meta=one_line(meaning, 60))


def _quoted_paths(typed: str) -> Iterator[Completion]:
    """Yield paths, in quotation marks where they have spaces or an apostrophe.

    A space follows a file: what is typed next is a word of its own.
    """
    begun = typed.removeprefix('"')
    directory = begun.rpartition("/")[0] + "/" if "/" in begun else ""
    for path in _paths(begun):
        whole = directory + path.text
        is_odd = any(character.isspace() or character == "'" for character in whole)
        mark = '"' if typed != begun or is_odd else ""
        end = "" if whole.endswith("/") else f"{mark} "
        yield Completion(f"{mark}{whole}{end}", -len(typed), display=path.display)


def _paths(typed: str) -> Iterator[Completion]:
    """Yield files and directories with the typed prefix; hidden ones only if it has a dot."""
    directory, _, beginning = typed.rpartition("/")
    try:
        place = user_path(f"{directory}/" if "/" in typed else ".")
        with os.scandir(place) as entries:
            found = sorted(
                (entry.name, entry.is_dir())
                for entry in entries
                if entry.name.startswith(beginning)
                and (beginning.startswith(".") or not entry.name.startswith("."))
            )
    except (OSError, UsageError):
        return
    for name, is_directory in found[:_MAX_PATHS]:
        if one_line(name, len(name) + 1) != name:
            continue  # names with control characters are not offered
        slash = "/" if is_directory else ""
        yield Completion(name + slash, -len(beginning), display=name + slash)


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
