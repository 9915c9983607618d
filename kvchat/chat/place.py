"""Place: where in a conversation's tree of turns the next message goes, and the moves in the tree.

The next message goes below the tip, or takes the place of the message that is being edited. Moving
deletes nothing: all turns stay in the tree.
"""

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.messages import MessageNumbers, in_words
from kvchat.chat.session import ChatSession
from kvchat.core.errors import UsageError
from kvchat.core.text import one_line, whole_number


class Place:
    """The place in the tree of one session, which is None before the first message.

    edited   the turn that the next message replaces, None if it replaces none
    undone   the tips that `redo` goes back to, the next one last
    copied_from   the id of the session that this one was begun as a copy of, in this process
    """

    def __init__(
        self,
        session: ChatSession | None,
        edited: Turn | None = None,
        undone: tuple[int, ...] = (),
    ) -> None:
        self.session = session
        self.edited = edited
        self._undone = list(undone)
        self.copied_from: str | None = None

    def reopened(self, session: ChatSession) -> "Place":
        """Return the same place in a session that was opened again from the same file."""
        return Place(session, self.edited, tuple(self._undone))

    @property
    def conversation(self) -> Conversation | None:
        return self.session.conversation if self.session is not None else None

    def require_conversation(self) -> Conversation:
        """Return the conversation; raises UsageError while it is empty."""
        if self.conversation is None or not len(self.conversation):
            raise UsageError("The conversation is empty.")
        return self.conversation

    def require_session(self) -> ChatSession:
        """Return the session; raises UsageError before the first message."""
        self.require_conversation()
        assert self.session is not None
        return self.session

    @property
    def parent_id(self) -> int:
        """The turn that the next message goes below."""
        if self.edited is not None:
            return self.edited.parent_id
        return self.conversation.tip_id if self.conversation is not None else ROOT

    @property
    def user_turns(self) -> list[Turn]:
        """The user's messages on the path to the tip; `MessageNumbers` numbers them."""
        path = self.conversation.path() if self.conversation is not None else []
        return [turn for turn in path if turn.is_message]

    @property
    def branch(self) -> tuple[int, int] | None:
        """The tip's number among its siblings and their count, None if it has no sibling."""
        if self.conversation is None or self.conversation.tip_id == ROOT:
            return None
        siblings = [turn.turn_id for turn in self.conversation.siblings(self.conversation.tip_id)]
        if len(siblings) < 2:
            return None
        return siblings.index(self.conversation.tip_id) + 1, len(siblings)

    @property
    def num_answers(self) -> int:
        """How many answers the last message of the path has."""
        turns = self.user_turns
        if not turns or self.conversation is None:
            return 0
        below = self.conversation.children(turns[-1].turn_id)
        return sum(turn.role is Role.ASSISTANT for turn in below)

    @property
    def editing(self) -> str:
        """Which message the next one replaces, as text for the toolbar; "" for none."""
        if self.edited is None or self.conversation is None:
            return ""
        return f"editing {MessageNumbers(self.conversation).of(self.edited)}"

    def user_turn(self, number: str) -> Turn:
        """Return the message on the path with this number; the last one for "".

        Raises UsageError for a number that is not one of the path.
        """
        turns = self.user_turns
        if not turns or self.conversation is None:
            if self.conversation is not None and len(self.conversation):
                raise UsageError("No message is before this place.", "/redo or /switch goes on.")
            raise UsageError("There is no message yet.")
        if not number:
            return turns[-1]
        numbers = MessageNumbers(self.conversation)
        wanted = whole_number(number)
        if wanted is not None:
            for turn in turns:
                if numbers.of(turn) == wanted:
                    return turn
            if numbers.find(wanted) is not None:
                raise UsageError(
                    f"Message {wanted} is on another branch.", f"/switch {wanted} goes there."
                )
        known = in_words([numbers.of(turn) for turn in turns])
        said = one_line(number, 20)
        raise UsageError(f"{said} is no message; on this branch they are numbered {known}.")

    # Moving

    def reset(self) -> None:
        """Edit no message any more, and let `redo` go back to no tip."""
        self.edited = None
        self.drop_undone()

    def drop_undone(self) -> None:
        """Let `redo` go back to no tip."""
        self._undone.clear()

    def move(self, turn_id: int) -> None:
        """Make another turn the tip."""
        self.reset()
        self.require_session().move_tip(turn_id)

    def undo(self, count: int = 1) -> list[Turn]:
        """Move the tip back by as many messages as there are, `count` at most; `redo` reverts it.

        Returns these messages; the last of them is now the next one. None at the beginning.
        """
        session = self.require_session()
        tip = session.conversation.tip_id
        self.edited = None
        undone: list[Turn] = []
        while len(undone) < count and (turn := session.undo()) is not None:
            undone.append(turn)
        if undone:
            self._undone.append(tip)
        return undone

    def redo(self) -> bool:
        """Revert the last undo, or else move the tip down to the newest next answer.

        Returns false if there is nothing below the tip.
        """
        session = self.require_session()
        conversation = session.conversation
        if self._undone:
            session.move_tip(self._undone.pop())
            return True
        further = _further_on(conversation, conversation.tip_id)
        if further is None:
            return False
        answer = _further_on(conversation, further.turn_id) if further.role is Role.USER else None
        session.move_tip((answer or further).turn_id)
        return True

    def step_sibling(self, step: int) -> Turn | None:
        """Make the next or previous sibling answer the tip; None where there is none."""
        branch = self.branch
        if branch is None or self.conversation is None:
            return None
        number, count = branch
        if not 1 <= number + step <= count:
            return None
        turn = self.conversation.siblings(self.conversation.tip_id)[number - 1 + step]
        self.move(turn.turn_id)
        return turn

    def forget(self, turn_id: int) -> None:
        """Remove a turn and all turns below it permanently. Raises StoreError."""
        self.require_session().forget(turn_id)
        self.reset()

    def set_system(self, system: str | None) -> None:
        """Move to the same place under another system prompt; nothing before the first message.

        Undone turns stay on the old prompt's branch and `redo` does not reach them. A message being
        edited becomes its copy under the new prompt.
        """
        if self.session is None:
            return
        before = self.user_turns
        self.session.set_system(system)
        self.drop_undone()
        if self.edited is not None:
            number = before.index(self.edited) if self.edited in before else None
            self.edited = self.user_turns[number] if number is not None else None


def _further_on(conversation: Conversation, turn_id: int) -> Turn | None:
    """Return the newest child of a turn; of ROOT, only a child with the current system prompt."""
    below = [
        turn
        for turn in conversation.children(turn_id)
        if turn_id != ROOT or turn.system == conversation.system
    ]
    return below[-1] if below else None
