"""Conversations without a model: turns with made-up ids, and a store to keep them in."""

from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.core.types import FinishReason

TOKENIZER = "t1-test"


def turn(
    turn_id: int,
    parent_id: int = ROOT,
    role: Role = Role.USER,
    text: str = "",
    ids: tuple[int, ...] | None = None,
    finish: FinishReason | None = None,
    system: str | None = None,
) -> Turn:
    """Return a turn whose ids spell its number unless they are given."""
    return Turn(
        turn_id=turn_id,
        parent_id=parent_id,
        role=role,
        text=text or f"text of {turn_id}",
        token_ids=ids if ids is not None else (turn_id, turn_id + 100),
        tokenizer=TOKENIZER,
        created_s=1_700_000_000.0 + turn_id,
        system=system,
        finish=finish,
    )


def branching_conversation(session_id: str = "20250102-030405-abcd") -> Conversation:
    """Two turns, a second answer to the first, and a third turn below that one."""
    conversation = Conversation(session_id, 1_735_787_045.5, "Be brief.")
    conversation.title = "héllo 😀"
    conversation.add(turn(1, system="Be brief.", text="first\nquestion"))
    conversation.add(turn(2, 1, Role.ASSISTANT, finish=FinishReason.STOP))
    conversation.add(turn(3, 2))
    conversation.add(turn(4, 1, Role.ASSISTANT, finish=FinishReason.CANCELLED))
    conversation.add(turn(5, 4, text="lone \udce9 surrogate"))
    conversation.add(turn(6, 5, Role.ASSISTANT))
    conversation.move_tip(3)
    return conversation
