"""What a session's file says, held against the session in memory."""

from kvchat.chat.conversation import Turn
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore


def saved_turns(store: SessionStore, session: ChatSession) -> list[Turn]:
    return list(store.read(session.session_id).conversation.turns())


def assert_saved(store: SessionStore, session: ChatSession) -> None:
    saved = store.read(session.session_id).conversation
    assert list(saved.turns()) == list(session.conversation.turns())
    assert saved.tip_id == session.conversation.tip_id
    assert saved.system == session.conversation.system
