"""Ids that a model does not have, in a saved conversation, cost a note and not the conversation."""

import json
from pathlib import Path

import pytest

from kvchat.chat.documents import import_file
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from support.tiny_host import ask

NOT_OF_THE_MODEL = "do not exist in this model"


def edited(path: Path, token_id: int) -> bytes:
    """Return a session file with one id in every turn exchanged for another."""
    lines = []
    for line in path.read_bytes().splitlines():
        event = json.loads(line)
        if event.get("ids"):
            event["ids"][-1] = token_id
        lines.append(json.dumps(event).encode() + b"\n")
    return b"".join(lines)


@pytest.mark.parametrize("token_id", [272, 1_000_000, 2**31 - 1])
@pytest.mark.parametrize("is_imported", [False, True], ids=["edited", "imported"])
def test_a_session_with_ids_beyond_the_vocabulary_is_read_again_from_its_text(
    host: ChatHost, store: SessionStore, tmp_path: Path, token_id: int, is_imported: bool
) -> None:
    """Its first answer failed for them, and so did every other from then on."""
    with_words = host.new_session()
    ask(with_words, "Hello")
    with_words.close()
    [path] = store.directory.glob(f"{with_words.session_id}*")
    data = edited(path, token_id)
    if is_imported:
        (tmp_path / "theirs.jsonl").write_bytes(data)
        session_id = import_file(store, tmp_path / "theirs.jsonl")
    else:
        path.write_bytes(data)
        session_id = with_words.session_id

    session = host.open_session(session_id)

    assert any(NOT_OF_THE_MODEL in note for note in session.notes)
    assert [turn.text for turn in session.conversation.turns()] == [
        turn.text for turn in with_words.conversation.turns()
    ]
    assert max(session.conversation.context_ids()) < 272
    assert ask(session, "And now?").usage.completion_tokens > 0
    session.close()


def test_ids_that_the_model_has_and_its_tokenizer_does_not_are_kept(host, store):
    """An embedding is often padded, and a model may sample what no text encodes to."""
    session = host.new_session()
    ask(session, "Hello")
    session.close()
    [path] = store.directory.glob(f"{session.session_id}*")
    path.write_bytes(edited(path, 271))

    again = host.open_session(session.session_id)

    assert 271 in again.conversation.context_ids()
    assert not again.notes
    again.close()
