"""Conversation: a tree of turns whose token ids are the truth and whose text is a view.

Every turn holds the exact ids it added to the context, so the context of any turn is the ids on its
path, whatever is done beside it. Knows turns and branches; does no I/O and renders nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kvchat.core.types import FinishReason

ROOT = 0
# The tokenizer of turns that come from a document: the first model to open them gives them ids.
NO_TOKENIZER = "none"


class Role(StrEnum):
    """Who said a turn."""

    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `parent_id` is ROOT for a turn that begins a branch from nothing.

    token_ids    what the turn adds to its parent's context: for a user turn the closing of the
                 answer before it and the opening of the next one included
    tokenizer    digest of the tokenizer the ids belong to
    system       the system prompt, on turns that begin a context; their ids include it
    finish       why an answer ended; None for user turns, and for an answer that was cut off by a
                 crash
    created_s    seconds since the epoch
    is_adopted   another model's turn: it had other ids, and these are made of its text
    is_imported  nobody's turn: it comes from a document, and its ids are made of its text
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

    @property
    def is_partial(self) -> bool:
        """Whether an answer did not end by itself."""
        return self.role is Role.ASSISTANT and self.finish is not FinishReason.STOP

    def with_ids(self, token_ids: tuple[int, ...], tokenizer: str) -> "Turn":
        """Return the same turn as another tokenizer writes it."""
        return replace(
            self,
            token_ids=token_ids,
            tokenizer=tokenizer,
            is_adopted=bool(self.token_ids),
            is_imported=self.is_imported or self.tokenizer == NO_TOKENIZER,
        )


class Conversation:
    """A tree of turns and the tip where it goes on.

    Turns are only ever added, and go only where the user wants them forgotten.
    """

    def __init__(self, session_id: str, created_s: float, system: str | None = None) -> None:
        self.session_id = session_id
        self.created_s = created_s
        self.system = system
        self.title = ""
        self.tip_id = ROOT
        self._last_id = ROOT
        self._turns: dict[int, Turn] = {}
        self._children: dict[int, list[int]] = {ROOT: []}

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def next_turn_id(self) -> int:
        return self._last_id + 1

    def turn(self, turn_id: int) -> Turn:
        """Return a turn; raises KeyError for an id that is not there."""
        return self._turns[turn_id]

    def turns(self) -> Iterator[Turn]:
        """Yield all turns in the order they were added."""
        yield from self._turns.values()

    def children(self, turn_id: int) -> list[Turn]:
        """Return the turns that continue `turn_id` (ROOT for the beginnings), oldest first."""
        return [self._turns[child] for child in self._children[turn_id]]

    def is_alone(self, turn_id: int) -> bool:
        """Whether a turn goes on with nothing, and nothing goes on with it."""
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
        """Return the last token id of a turn's context, None where that is empty."""
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
        """Put a turn in place of an earlier state of itself: an answer that has grown."""
        before = self._turns[turn.turn_id]
        assert before.parent_id == turn.parent_id
        assert before.role is turn.role
        self._turns[turn.turn_id] = turn

    def remove(self, turn_id: int) -> set[int]:
        """Forget a turn and all below it, for good; return their ids.

        A tip among them moves to the turn before.
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
        """Return the ids of a turn and of all below it."""
        found, pending = set(), [turn_id]
        while pending:
            current = pending.pop()
            found.add(current)
            pending += self._children[current]
        return found

    def copies(self, turn_id: int) -> set[int]:
        """Return a turn's id, and those of the same words said at the same moments in the same
        order on other branches: what another system prompt made of its path, or was made from.
        """
        said = self._said(turn_id)
        same = (turn for turn in self._turns.values() if _key(turn) == said[-1])
        return {turn.turn_id for turn in same if self._said(turn.turn_id) == said}

    def _said(self, turn_id: int) -> list[tuple[float, Role, str]]:
        return [_key(turn) for turn in self.path(turn_id)]

    def contexts(self, turn_id: int = ROOT) -> list[list[int]]:
        """Return the token ids of every branch through a turn, or a copy of it, to its end."""
        wanted = self.copies(turn_id) if turn_id != ROOT else None
        return [
            self.context_ids(leaf.turn_id)
            for leaf in self.leaves()
            if wanted is None or wanted & {turn.turn_id for turn in self.path(leaf.turn_id)}
        ]

    def move_tip(self, turn_id: int) -> None:
        """Go on from another turn, or from ROOT. Nothing is lost: branches stay."""
        assert turn_id in self._children, f"turn {turn_id} is not there"
        self.tip_id = turn_id

    def latest_below(self, turn_id: int) -> int:
        """Return the newest leaf below a turn: where a branch was left."""
        while self._children[turn_id]:
            turn_id = self._children[turn_id][-1]
        return turn_id

    @property
    def label(self) -> str:
        """The title, or the beginning of the first message where there is none."""
        first = next((turn.text for turn in self._turns.values()), "")
        return self.title or " ".join(first.split())[:60]

    def leaves(self) -> list[Turn]:
        """Return the last turn of every branch."""
        return [turn for turn in self._turns.values() if not self._children[turn.turn_id]]

    def check(self) -> None:
        """Re-derive the tree's invariants; raises AssertionError."""
        assert self.tip_id in self._children
        for turn in self._turns.values():
            assert turn.turn_id in self._children[turn.parent_id]
            assert turn.parent_id < turn.turn_id, "a turn is older than its parent"
        assert sum(len(children) for children in self._children.values()) == len(self._turns)


def _key(turn: Turn) -> tuple[float, Role, str]:
    """Return what a turn has in common with its copies, and with nothing said at another time."""
    return turn.created_s, turn.role, turn.text
