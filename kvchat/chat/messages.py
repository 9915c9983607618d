"""Numbers the user's messages, and arranges a conversation's branches for display.

A message has one number in the whole conversation, counted in the order of typing; copies of a
message have the number of the original. A copied path is displayed once: what follows it hangs
below a label that names the other system prompt, or the summary that stands for earlier messages.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.core.text import whole_number


class MessageNumbers:
    """The numbers of a conversation's messages, as it is now."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._originals = conversation.originals()
        originals = (t for t in conversation.turns() if self._originals[t.turn_id] == t.turn_id)
        messages = (turn.turn_id for turn in originals if turn.is_message)
        self._numbers = {turn_id: number for number, turn_id in enumerate(messages, start=1)}

    def of(self, turn: Turn) -> int:
        """Return a message's number, or the number of the message before an answer; 0 for none."""
        while not turn.is_message:
            if turn.parent_id == ROOT:
                return 0
            turn = self._conversation.turn(turn.parent_id)
        return self._numbers[self._originals[turn.turn_id]]

    def find(self, number: int) -> Turn | None:
        """Return the message with a number: the copy on the path to the tip, or else the newest."""
        copies = [t for t in self._conversation.turns() if t.is_message and self.of(t) == number]
        on_path = [turn for turn in self._conversation.path() if turn in copies]
        return next(iter([*on_path, *copies[::-1]]), None)


def in_words(numbers: list[int]) -> str:
    """Return rising numbers in words: `1 to 4 and 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a context: its system prompt, and the last turn of its summary, if any."""

    system: str | None = None
    summary_of: int | None = None


@dataclass(slots=True)
class TreeNode:
    """A place in the displayed tree: a turn, or the label of another opening.

    turn      None for a label
    opening   what a label names
    turn_id   the turn that the children continue: for a label, the last one that was copied below
              its opening
    """

    turn: Turn | None = None
    turn_id: int = ROOT
    opening: Opening = field(default_factory=Opening)
    children: "list[TreeNode]" = field(default_factory=list)
    parent: "TreeNode | None" = None


class MessageTree:
    """The displayed tree. `root` has neither turn nor label; `tip` is where the next turn goes."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._originals = conversation.originals()
        self._openings: dict[int, Opening] = {ROOT: Opening()}
        self._nodes: dict[int, TreeNode] = {}  # by original turn
        self._labels: dict[Hashable, TreeNode] = {}
        self.root = TreeNode()
        self._nodes[ROOT] = self.root
        for turn in conversation.turns():
            self._openings[turn.turn_id] = self._opening(turn)
            if turn.summary_of is not None:
                summarised = self._originals.get(turn.summary_of, ROOT)
                self._nodes[turn.turn_id] = self._nodes.get(summarised, self.root)
            elif self._originals[turn.turn_id] == turn.turn_id:
                place = self._place(turn.parent_id, self._openings[turn.turn_id])
                self._nodes[turn.turn_id] = _add(place, TreeNode(turn, turn.turn_id))
        tip = conversation.tip_id
        self.tip = self._place(tip, self._openings[tip])

    def path(self) -> list[TreeNode]:
        """Return the nodes from the first to the tip."""
        found, node = [], self.tip
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def _opening(self, turn: Turn) -> Opening:
        if turn.parent_id == ROOT:
            return Opening(turn.system, turn.summary_of)
        return self._openings[turn.parent_id]

    def _place(self, turn_id: int, opening: Opening) -> TreeNode:
        """Return the node below which a child of a turn is displayed, a label if one is needed."""
        original = self._originals[turn_id]
        node = self._nodes[original]
        drawn = self._openings[node.turn.turn_id] if node.turn is not None else Opening()
        if opening == drawn:
            return node
        key = (id(node), opening)
        if key not in self._labels:
            self._labels[key] = _add(node, TreeNode(None, turn_id, opening))
        return self._labels[key]


def _add(parent: TreeNode, node: TreeNode) -> TreeNode:
    node.parent = parent
    parent.children.append(node)
    return node


def answer_place(conversation: Conversation, answer: Turn) -> tuple[int, int]:
    """Return an answer's number among the answers to its message, and their count."""
    answers = [t.turn_id for t in conversation.siblings(answer.turn_id) if t.role is answer.role]
    return answers.index(answer.turn_id) + 1, len(answers)


def find_place(conversation: Conversation, text: str) -> Turn | None:
    """Return the turn that `3` (a message) or `3.2` (the second answer to it) names, else None."""
    message, _, answer = text.partition(".")
    number, place = whole_number(message), whole_number(answer) if answer else 0
    turn = MessageNumbers(conversation).find(number) if number is not None else None
    if turn is None or place is None:
        return None
    if not place:
        return turn
    answers = [t for t in conversation.children(turn.turn_id) if t.role is Role.ASSISTANT]
    return answers[place - 1] if 1 <= place <= len(answers) else None
