"""Conversation: a tree of turns. A turn's token ids are authoritative; its text is for display.

Every turn holds the exact ids that it adds to the context. The context of a turn is the ids on its
path; changes to other branches do not affect it. This module does no I/O.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kvchat.chat.tools import ToolCall, ToolResult, ToolSet
from kvchat.core.text import one_line
from kvchat.core.types import FinishReason

ROOT = 0
_MAX_LABEL_CHARS = 60
_MAX_READ_CHARS = 1000  # enough of a long message for that
# The tokenizer digest of imported turns: they have no ids until a model opens them.
NO_TOKENIZER = "none"


class Role(StrEnum):
    """The author of a turn."""

    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `parent_id` is ROOT for the first turn of a context.

    token_ids    the ids that the turn adds to its parent's context. A user turn's ids include the
                 template text that closes the answer before it and opens the next answer
    tokenizer    digest of the tokenizer of these ids
    system       the system prompt, on the first turn of a context; its ids include the prompt
    finish       why an answer ended; None for user turns, and for an answer that a crash cut off
    created_s    seconds since the epoch
    is_adopted   another model's turn: its ids were encoded again from its text
    is_imported  a turn from a document: its ids were encoded from its text
    copy_of      the turn that this is a copy of, in another context
    summary_of   on the two turns that carry a summary: the last turn that it summarises
    calls        the tool calls in an answer
    results      on a user turn: what the calls in the answer before returned, before its text
    """

    turn_id: int
    parent_id: int
    role: Role
    text: str
    token_ids: tuple[int, ...]
    tokenizer: str
    created_s: float
    system: str | None = None
    finish: FinishReason | None = None
    is_adopted: bool = False
    is_imported: bool = False
    copy_of: int | None = None
    summary_of: int | None = None
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()

    @property
    def is_message(self) -> bool:
        """Whether the user typed this turn."""
        is_typed = bool(self.text) or not self.results
        return self.role is Role.USER and self.summary_of is None and is_typed

    @property
    def is_partial(self) -> bool:
        """Whether this is an answer that did not end with a stop token or stop string."""
        return self.role is Role.ASSISTANT and self.finish is not FinishReason.STOP

    def with_ids(self, token_ids: tuple[int, ...], tokenizer: str) -> "Turn":
        """Return the same turn with the ids of another tokenizer, whose digest is given."""
        return replace(
            self,
            token_ids=token_ids,
            tokenizer=tokenizer,
            is_adopted=bool(self.token_ids),
            is_imported=self.is_imported or self.tokenizer == NO_TOKENIZER,
        )


class Conversation:
    """A tree of turns and the tip, below which the next turn is added.

    Turns are removed only when the user asks to forget them. `tools` stand at the beginning of
    every context, as the system prompt does. `waiting` are messages that the user had typed ahead
    when the process that had the conversation open ended; they are no turns. `adopted` has the
    turns whose ids of another tokenizer the file has too, with the tokenizer. `settings` are the
    values of parameters that the conversation goes on with, by their names; None if not known.
    """

    def __init__(
        self,
        session_id: str,
        created_s: float,
        system: str | None = None,
        tools: ToolSet | None = None,
    ) -> None:
        self.session_id = session_id
        self.created_s = created_s
        self.system = system
        self.tools = tools
        self.title = ""
        self.waiting: tuple[str, ...] = ()
        self.adopted: set[tuple[int, str]] = set()
        self.settings: dict[str, Any] | None = None
        self.tip_id = ROOT
        self._last_id = ROOT
        self._turns: dict[int, Turn] = {}
        self._children: dict[int, list[int]] = {ROOT: []}

    def copied(self, session_id: str) -> "Conversation":
        """Return a copy of all turns, with the same tip, as a conversation without a title."""
        copy = Conversation(session_id, self.created_s, self.system, self.tools)
        for turn in self.turns():
            copy.add(turn)
        copy.move_tip(self.tip_id)
        return copy

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def next_turn_id(self) -> int:
        return self._last_id + 1

    def turn(self, turn_id: int) -> Turn:
        """Return a turn; raises KeyError for an unknown id."""
        return self._turns[turn_id]

    def has(self, turn_id: int) -> bool:
        """Whether there is a turn with this id."""
        return turn_id in self._turns

    def turns(self) -> Iterator[Turn]:
        """Yield all turns in the order they were added."""
        yield from self._turns.values()

    def children(self, turn_id: int) -> list[Turn]:
        """Return the children of a turn (of ROOT: the first turns of contexts), oldest first."""
        return [self._turns[child] for child in self._children[turn_id]]

    def is_alone(self, turn_id: int) -> bool:
        """Whether a turn has neither a parent nor children."""
        return self._turns[turn_id].parent_id == ROOT and not self.children(turn_id)

    def siblings(self, turn_id: int) -> list[Turn]:
        """Return a turn and its alternatives, oldest first."""
        return self.children(self._turns[turn_id].parent_id)

    def path(self, turn_id: int | None = None) -> list[Turn]:
        """Return the turns from the beginning to `turn_id`, by default to the tip."""
        current = self.tip_id if turn_id is None else turn_id
        path = []
        while current != ROOT:
            turn = self._turns[current]
            path.append(turn)
            current = turn.parent_id
        return path[::-1]

    def context_ids(self, turn_id: int | None = None) -> list[int]:
        """Return the token ids of a turn's whole context, by default the tip's."""
        return [token for turn in self.path(turn_id) for token in turn.token_ids]

    def last_token(self, turn_id: int) -> int | None:
        """Return the last token id of a turn's context, None if the context is empty."""
        while turn_id != ROOT:
            turn = self._turns[turn_id]
            if turn.token_ids:
                return turn.token_ids[-1]
            turn_id = turn.parent_id
        return None

    def add(self, turn: Turn) -> None:
        """Add a turn below its parent and make it the tip."""
        assert turn.turn_id not in self._turns
        assert turn.turn_id != ROOT
        assert turn.parent_id in self._children, f"turn {turn.parent_id} is not there"
        self._turns[turn.turn_id] = turn
        self._last_id = max(self._last_id, turn.turn_id)
        self._children[turn.turn_id] = []
        self._children[turn.parent_id].append(turn.turn_id)
        self.tip_id = turn.turn_id

    def replace(self, turn: Turn) -> None:
        """Replace a turn by a newer version of itself, such as a longer answer."""
        before = self._turns[turn.turn_id]
        assert before.parent_id == turn.parent_id
        assert before.role is turn.role
        self._turns[turn.turn_id] = turn

    def remove(self, turn_id: int) -> set[int]:
        """Remove a turn and all turns below it; return their ids.

        If the tip is removed, it moves to the turn's parent.
        """
        parent, gone = self._turns[turn_id].parent_id, self.below(turn_id)
        for current in gone:
            del self._turns[current], self._children[current]
        self._children[parent].remove(turn_id)
        self._last_id = max(self._turns, default=ROOT)
        if self.tip_id in gone:
            self.tip_id = parent
        return gone

    def below(self, turn_id: int) -> set[int]:
        """Return the ids of a turn and of all its descendants."""
        found, pending = set(), [turn_id]
        while pending:
            current = pending.pop()
            found.add(current)
            pending += self._children[current]
        return found

    def originals(self) -> dict[int, int]:
        """Return for every turn's id the id of its first copy, which may be the turn itself.

        Changing the system prompt and compacting copy turns. A turn that does not say what it is a
        copy of is one if all turns on its path agree with another path in text, role and time.
        """
        found = {ROOT: ROOT}
        first: dict[tuple[int, tuple[float, Role, str]], int] = {}
        for turn in self._turns.values():
            said = first.setdefault((found[turn.parent_id], _key(turn)), turn.turn_id)
            found[turn.turn_id] = found.get(turn.copy_of, said) if turn.copy_of else said
        return found

    def before_compaction(self) -> int:
        """Return the turn that was the tip before the path was compacted, ROOT if that is not last.

        It is not last where a message or another system prompt followed.
        """
        path = self.path()
        if not path or path[0].summary_of is None or path[0].copy_of:
            return ROOT
        tip = path[-1]
        before = tip.summary_of if tip.summary_of is not None else tip.copy_of
        return before if before in self._turns else ROOT

    def copies(self, turn_id: int) -> set[int]:
        """Return the ids of a turn, of its copies on other branches, and of summaries of it.

        A summary of a summary counts too.
        """
        originals = self.originals()
        found: set[int] = set()
        for turn in self._turns.values():
            is_summary = turn.summary_of in self._turns
            summarised = self.path(turn.summary_of) if is_summary else []
            if originals[turn.turn_id] == originals[turn_id] or any(
                t.turn_id in found or originals[t.turn_id] == originals[turn_id] for t in summarised
            ):
                found.add(turn.turn_id)
        return found

    def contexts(self, turn_id: int = ROOT) -> list[list[int]]:
        """Return the token ids of every branch, to its leaf, that contains a turn or its copies."""
        wanted = self.copies(turn_id) if turn_id != ROOT else None
        return [
            self.context_ids(leaf.turn_id)
            for leaf in self.leaves()
            if wanted is None or wanted & {turn.turn_id for turn in self.path(leaf.turn_id)}
        ]

    def move_tip(self, turn_id: int) -> None:
        """Make another turn, or ROOT, the tip. All branches stay."""
        assert turn_id in self._children, f"turn {turn_id} is not there"
        self.tip_id = turn_id

    def latest_below(self, turn_id: int) -> int:
        """Return the leaf below a turn that is reached through the newest children."""
        while self._children[turn_id]:
            turn_id = self._children[turn_id][-1]
        return turn_id

    @property
    def label(self) -> str:
        """The title, or else the first words of the first message, sent or waiting: 60 characters
        at most, with an ellipsis where there are more.
        """
        first = next((turn.text for turn in self._turns.values()), "".join(self.waiting[:1]))
        return self.title or one_line(first[:_MAX_READ_CHARS], _MAX_LABEL_CHARS)

    def leaves(self) -> list[Turn]:
        """Return the last turn of every branch."""
        return [turn for turn in self._turns.values() if not self._children[turn.turn_id]]

    def check(self) -> None:
        """Check the tree's invariants; raises AssertionError."""
        assert self.tip_id in self._children
        for turn in self._turns.values():
            assert turn.turn_id in self._children[turn.parent_id]
            assert turn.parent_id < turn.turn_id, "a turn is older than its parent"
        assert sum(len(children) for children in self._children.values()) == len(self._turns)


def _key(turn: Turn) -> tuple[float, Role, str]:
    """Return the fields that a turn shares with its copies and with no other turn."""
    return turn.created_s, turn.role, turn.text
