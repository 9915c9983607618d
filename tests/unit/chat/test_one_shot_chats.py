"""What a conversation's KV counts for on disk: little where a single message was asked by a script,
as much as any other's where the user went on with it.
"""

import sqlite3
from pathlib import Path

from kvchat.cache.disk.inventory import read_model_dir, stored_model_dirs
from kvchat.cache.disk.model_dirs import DATABASE
from kvchat.cache.keys import chain_keys, encode_ids, root_key
from kvchat.chat.conversation import Conversation
from kvchat.chat.session import ChatSession
from support.tiny_host import answer_options, finish, tiny_host

LONG = "Tell me of the ships that lie in the harbour of Grimstad. " * 2


def credits_of(directory: Path, conversation: Conversation) -> list[float]:
    """Return, of each pack of a conversation, how far its credit lies before its last use."""
    [model_dir] = stored_model_dirs(directory)
    layout = read_model_dir(model_dir).layout
    keys = chain_keys(
        root_key(layout.identity), encode_ids(conversation.context_ids()), layout.ids_bytes
    )
    with sqlite3.connect(model_dir / DATABASE) as table:
        known = dict(table.execute("SELECT key, last_s - credit_s FROM Pack").fetchall())
    table.close()
    return [known[key] for key in keys if key in known]


def test_one_process_tells_single_questions_from_conversations(checkpoint, tmp_path):
    host = tiny_host(checkpoint, None, kept=tmp_path / "kv")
    once, chat, followed, retried = (host.new_session(f"{n}") for n in range(4))

    def ask(session: ChatSession, is_one_shot: bool) -> None:
        finish(session.ask(LONG, answer_options(is_one_shot=is_one_shot)))

    ask(chat, is_one_shot=False)  # and what all have in common
    ask(once, is_one_shot=True)
    ask(followed, is_one_shot=True)
    ask(followed, is_one_shot=True)
    ask(retried, is_one_shot=True)
    finish(retried.retry(answer_options(max_tokens=30, is_one_shot=True)))
    host.close()

    marks = {
        session.conversation.session_id: credits_of(tmp_path / "kv", session.conversation)
        for session in (once, chat, followed, retried)
    }
    assert marks[once.session_id][-1] > 0, "as one that was used days ago"
    for session in (chat, followed, retried):
        assert max(marks[session.session_id]) <= 0
