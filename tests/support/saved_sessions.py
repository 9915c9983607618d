"""What a session's file says, held against the session in memory; and files of other models."""

import time

from kvchat.chat import session_file
from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore, new_session_id
from kvchat.core.types import FinishReason


def saved_turns(store: SessionStore, session: ChatSession) -> list[Turn]:
    return list(store.read(session.session_id).conversation.turns())


def assert_saved(store: SessionStore, session: ChatSession) -> None:
    saved = store.read(session.session_id).conversation
    assert list(saved.turns()) == list(session.conversation.turns())
    assert saved.tip_id == session.conversation.tip_id
    assert saved.system == session.conversation.system


def save_chat(store: SessionStore, *said: str, is_one_shot: bool = False) -> str:
    """Save a conversation, message and answer by turns, as some model would; return its id."""
    conversation = Conversation(new_session_id(), time.time())
    log = store.create(conversation, "some model", is_one_shot)
    for number, text in enumerate(said):
        role = Role.ASSISTANT if number % 2 else Role.USER
        ids = tuple(range(len(text)))
        turn = Turn(number + 1, number, role, text, ids, "some tokenizer", time.time())
        log.write(session_file.turn_line(turn))
        if role is Role.ASSISTANT:
            log.write(session_file.end_line(turn.turn_id, FinishReason.STOP, {}))
    log.close()
    return conversation.session_id
