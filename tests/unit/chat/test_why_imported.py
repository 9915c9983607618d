"""Why an imported conversation is read: it was never prefilled, so nothing was lost."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.chat.conversation import NO_TOKENIZER, ROOT, Conversation, Role, Turn
from kvchat.chat.documents import import_file
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.chat.why import Change, Reuse, cause, explain, reuse_of
from kvchat.core.types import CachedTokens, MissReason
from support.patient_kvchat import be_patient
from support.tiny_host import ask, tiny_host

TEXT = "Of the twelve ships in the harbour of Grimstad three are red and nine are blue. "
NOTHING = CachedTokens()


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "messages.json"
    said = [("user", TEXT), ("assistant", "So I see."), ("user", TEXT), ("assistant", "Again?")]
    path.write_text(json.dumps([{"role": role, "content": text} for role, text in said]))
    return path


def answered(host: ChatHost, session_id: str, *questions: str) -> list[Reuse]:
    """Return what is known of each answer to questions that go on with a conversation."""
    session = host.open_session(session_id)
    found = []
    for question in questions:
        ended = ask(session, question)
        used = ended.usage.cached
        found.append(reuse_of(session.conversation, ended.turn_id, used, ended.miss_reason))
    session.close()
    return found


def told(reuse: Reuse) -> str:
    return "\n".join(explain(reuse, str))


def test_the_first_answer_reads_what_no_model_had_read(checkpoint, tmp_path, store, document):
    """It was said to be read again, as it was never kept: a process might have been killed."""
    host = tiny_host(checkpoint, store, kept=tmp_path / "kv")

    first, second = answered(host, import_file(store, document), "How many?", "And blue?")

    assert (first.num_lost, cause(first)) == (0, ""), "nothing was read again"
    assert told(first).endswith(
        "were read: the conversation was imported, and no model had read it yet."
    )
    assert cause(second) == ""
    [same] = answered(host, import_file(store, document), "How many?")
    assert cause(same) == "", "its KV is there: it has been imported before"
    assert "1 was read: new text." in told(same)
    host.close()


def test_the_second_process_knows_that_it_was_read(
    checkpoint: Path,
    tmp_path: Path,
    store: SessionStore,
    document: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file says of imported turns for ever that no model wrote them; each opening said that
    another model had.
    """
    be_patient(monkeypatch)
    session_id = import_file(store, document)
    host = tiny_host(checkpoint, store, kept=tmp_path / "kv")
    answered(host, session_id, "How many?")
    host.close()

    host = tiny_host(checkpoint, store, kept=tmp_path / "elsewhere")
    session = host.open_session(session_id)
    assert session.notes == ()
    session.close()
    [found] = answered(host, session_id, "And blue?")
    host.close()

    assert cause(found) == "not written before the last run ended"
    assert found.num_lost > len(TEXT)


class Imported:
    """A conversation of two imported exchanges, whose ids are those of its letters."""

    def __init__(self) -> None:
        self.conversation = Conversation("id", 0.0)
        for role in (Role.USER, Role.ASSISTANT) * 2:
            self.add(role, f"{role}: {TEXT}", is_imported=True)

    def add(
        self, role: Role, text: str, parent: int | None = None, is_imported: bool = False
    ) -> int:
        number = self.conversation.next_turn_id
        ids = tuple(ord(letter) for letter in text)
        above = self.conversation.tip_id if parent is None else parent
        turn = Turn(number, above, role, text, ids, "one", float(number), is_imported=is_imported)
        self.conversation.add(turn)
        return number

    def answer(self, parent: int) -> int:
        return self.add(Role.ASSISTANT, "fine", self.add(Role.USER, "how are you", parent))

    def why(self, turn_id: int) -> Reuse:
        return reuse_of(self.conversation, turn_id, NOTHING, MissReason.NEVER_WRITTEN)


def test_only_what_an_answer_continued_was_read() -> None:
    """Two turns back first, and then on from the end: one half had been read, the other had not."""
    talk = Imported()
    beginning = talk.answer(2)
    end = talk.answer(4)

    assert (cause(talk.why(beginning)), cause(talk.why(end))) == (
        "not written before the last run ended",
        "not written before the last run ended",
    )
    assert talk.why(end).num_shared == len(talk.conversation.context_ids(2))
    assert "The first token that differs" not in told(talk.why(end))
    later = talk.answer(end)
    assert talk.why(later).num_shared == len(talk.conversation.context_ids(end))


def test_another_models_answers_were_read_by_it() -> None:
    talk = Imported()
    talk.answer(4)
    conversation = talk.conversation
    for turn in list(conversation.turns()):
        as_saved = replace(turn, token_ids=(), tokenizer=NO_TOKENIZER) if turn.is_imported else turn
        conversation.replace(as_saved.with_ids(turn.token_ids, "two"))
    assert not conversation.turn(1).is_adopted

    assert cause(talk.why(talk.answer(6))) == "model changed"


def test_another_system_prompt_is_told_as_that() -> None:
    """All turns are written anew then, the imported ones too, and no model has read the copies."""
    talk = Imported()
    talk.answer(4)
    talk.conversation.system = "be dull. " * 5
    above = ROOT
    for turn in talk.conversation.path():
        ids = tuple(map(ord, "be dull. " * 5)) if above == ROOT else ()
        copy = replace(
            turn,
            turn_id=talk.conversation.next_turn_id,
            parent_id=above,
            token_ids=(*ids, *turn.token_ids),
            system=talk.conversation.system if above == ROOT else None,
        )
        talk.conversation.add(copy)
        above = copy.turn_id

    assert cause(talk.why(talk.answer(above))) == "system prompt changed"


def test_what_is_new_at_the_root_is_new() -> None:
    talk = Imported()

    found = talk.why(talk.answer(ROOT))

    assert (found.before, found.change) == ((), Change.NEW)
