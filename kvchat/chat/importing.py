"""A conversation from a file becomes one of the store: a session file's copy, or plain messages.

Knows documents and the store; shows nothing.
"""

import time
from contextlib import suppress
from pathlib import Path

from kvchat.chat.conversation import NO_TOKENIZER, Conversation, Role, Turn
from kvchat.chat.session_file import end_line, read_session, tip_line, title_line, turn_line
from kvchat.chat.store import MAX_SESSION_BYTES, SessionStore, new_session_id
from kvchat.chat.transcript import read_messages
from kvchat.core.bounded_files import read_bounded
from kvchat.core.errors import SessionNotFound, StoreError, UsageError
from kvchat.core.types import FinishReason


def import_file(store: SessionStore, path: Path) -> str:
    """Add the conversation in a file to the store and return its new id.

    The file stays as it is. Raises `UsageError` if it cannot be read or holds no messages, and
    `StoreError` if it is a session no version can read, or if the copy cannot be saved.
    """
    try:
        data = read_bounded(path, MAX_SESSION_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    conversation = _from_session(data, path.name)
    if conversation is None:
        conversation = _from_messages(data)
    if not len(conversation):
        raise UsageError(f"{path} holds no messages.")
    log = store.create(conversation, "")
    for turn in conversation.turns():
        log.write(turn_line(turn))
        if turn.finish is not None:
            log.write(end_line(turn.turn_id, turn.finish, {}))
    log.write(tip_line(conversation.tip_id))
    log.write(title_line(conversation.title), durable=True)
    if (problem := log.close()) is not None:
        with suppress(StoreError, SessionNotFound):
            store.remove(conversation.session_id)
        raise StoreError(f"{path} is not imported: {problem}")
    return conversation.session_id


def _from_session(data: bytes, name: str) -> Conversation | None:
    if not data.startswith(b'{"kvchat"'):
        return None
    original = read_session(data, name).conversation
    copy = Conversation(new_session_id(), original.created_s, original.system)
    copy.title = original.label
    for turn in original.turns():
        copy.add(turn)
    copy.move_tip(original.tip_id)
    return copy


def _from_messages(data: bytes) -> Conversation:
    system, messages = read_messages(data.decode("utf-8", errors="replace"))
    now_s = time.time()
    conversation = Conversation(new_session_id(), now_s, system)
    for role, text in messages:
        is_answer = role is Role.ASSISTANT
        conversation.add(
            Turn(
                turn_id=conversation.next_turn_id,
                parent_id=conversation.tip_id,
                role=role,
                text=text,
                token_ids=(),
                tokenizer=NO_TOKENIZER,
                created_s=now_s,
                system=system if not conversation.tip_id else None,
                finish=FinishReason.STOP if is_answer else None,
            )
        )
    return conversation
