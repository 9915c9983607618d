"""A file's conversation in the store: the same turns under a new id, the file untouched."""

import json
from pathlib import Path

import pytest

from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.documents import import_file
from kvchat.chat.session_file import header_line, read_session, tip_line, turn_line
from kvchat.chat.store import SessionStore
from kvchat.core.errors import StoreError, UsageError
from support.turns import branching_conversation

SAMPLES = Path(__file__).parents[3] / "sessions"


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "store")


def turns_of(conversation: Conversation) -> list[tuple[int, int, Role, str, tuple[int, ...]]]:
    return [
        (turn.turn_id, turn.parent_id, turn.role, turn.text, tuple(turn.token_ids))
        for turn in conversation.turns()
    ]


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_session_is_copied_with_all_its_branches(sample: Path, store: SessionStore) -> None:
    before = sample.read_bytes()
    original = read_session(before, sample.name).conversation

    copied = store.read(import_file(store, sample)).conversation

    assert turns_of(copied) == turns_of(original)
    assert copied.session_id != original.session_id
    assert copied.system == original.system
    assert copied.title == original.label
    assert sample.read_bytes() == before


def test_plain_messages_become_a_conversation_that_has_no_ids_yet(store, tmp_path):
    path = tmp_path / "messages.json"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
    ]
    path.write_text(json.dumps({"messages": messages}))

    conversation = store.read(import_file(store, path)).conversation

    assert conversation.system == "Be brief."
    assert [(turn.role, turn.text) for turn in conversation.turns()] == [
        (Role.USER, "Hello"),
        (Role.ASSISTANT, "Hi!"),
    ]
    assert not any(turn.token_ids for turn in conversation.turns())


def test_an_imported_session_goes_on_from_the_branch_it_was_left_on(store, tmp_path):
    """It went on from the branch that was begun last: where the tip was, was not written."""
    original = branching_conversation()
    path = tmp_path / "left.jsonl"
    lines = [header_line(original, ""), *(turn_line(turn) for turn in original.turns())]
    path.write_text("".join([*lines, tip_line(original.tip_id)]))

    copied = store.read(import_file(store, path)).conversation

    assert copied.tip_id == original.tip_id
    assert copied.context_ids() == original.context_ids()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "holds no messages"),
        ('[{"role": "system", "content": "Be brief."}]', "holds no messages"),
        (header_line(Conversation("x", 1.0), ""), "holds no messages"),  # a session without turns
        *((content, "") for content in (None, "no JSON", '{"a": 1}', '{"kvchat": 99}')),
    ],
)
def test_what_is_no_conversation_leaves_the_store_empty(content, sentence, store, tmp_path):
    """An empty conversation was made of one without messages, or it was said to be no JSON."""
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)

    with pytest.raises((UsageError, StoreError), match=sentence or None):
        import_file(store, path)

    assert store.summaries() == []
