"""Conversations on disk: saved as they happen, resumed exactly, and safe from kill -9."""

import json
import os
import time
from datetime import datetime

import pytest

from kvchat.chat import saved_conversation
from kvchat.chat.chat_model import read_chat_model
from kvchat.chat.conversation import Role
from kvchat.chat.events import AnswerEnded, AnswerFailed, AnswerText
from kvchat.chat.host import ChatHost
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.chat.template import NewTurn
from kvchat.core.errors import ContextTooLong, ExitCode, ModelError
from kvchat.core.types import FinishReason
from kvchat.model.checkpoint.source import find_model
from support.checkpoints import save_checkpoint, tiny_model
from support.other_process import start_python
from support.saved_sessions import assert_saved, saved_turns
from support.template_zoo import CHATML
from support.tiny_host import answer_options, ask, finish, tiny_host
from support.tokenizer_zoo import byte_fallback


def test_everything_is_in_the_file_as_it_is_in_memory(session, store):
    ask(session, "one")
    ask(session, "two")
    session.rename("Numbers")

    assert_saved(store, session)
    assert store.read(session.session_id).conversation.title == "Numbers"


def test_the_users_turn_is_on_disk_before_the_answer_begins(session, store):
    session.add_user_turn("Remember this.")

    assert [turn.text for turn in saved_turns(store, session)] == ["Remember this."]


def test_a_fork_has_everything_and_leaves_the_original_alone(host, session, store):
    ask(session, "first")
    session.undo()
    ask(session, "other first")
    before = saved_turns(store, session)

    fork = host.fork_session(session.conversation)
    assert fork.conversation.context_ids() == session.conversation.context_ids()
    next_answer = ask(fork, "only in the fork")

    assert next_answer.usage.cached.total >= len(session.conversation.context_ids()) - 1
    assert saved_turns(store, session) == before
    assert fork.conversation.label == "first (fork)"
    assert fork.session_id != session.session_id
    assert_saved(store, fork)
    fork.close()


def test_an_interrupted_answer_is_kept_to_the_token(session, store):
    reply = session.ask("Go on and on", answer_options(max_tokens=300))
    shown = ""
    for event in reply:
        if isinstance(event, AnswerText):
            shown += event.text
            if len(shown) > 5:
                reply.cancel()
        if isinstance(event, AnswerEnded):
            assert event.reason is FinishReason.CANCELLED
            assert event.text == shown
            num_generated = event.usage.completion_tokens

    partial = session.conversation.turn(session.conversation.tip_id)
    assert partial.is_partial
    assert len(partial.token_ids) == num_generated
    assert partial.text == shown
    assert_saved(store, session)
    # The next turn closes what the answer left open.
    following = session.add_user_turn("Stop")
    assert following.token_ids[0] == session.model.format.answer.closing_id
    assert (
        finish(session.retry(answer_options())).usage.cached.total
        >= len(session.conversation.context_ids(partial.turn_id)) - 1
    )


def test_resuming_in_another_process_goes_on_as_if_nothing_had_been(checkpoint, tmp_path):
    store = SessionStore(tmp_path)
    texts = ["first", "second", "third"]
    one_go = tiny_host(checkpoint, None)
    whole = one_go.new_session(system="S")
    expected = [ask(whole, text).text for text in texts]
    one_go.close()

    got, session_id = [], ""
    for text in texts:
        host = tiny_host(checkpoint, store)
        session = host.open_session(session_id) if session_id else host.new_session(system="S")
        session_id = session.session_id
        got.append(ask(session, text).text)
        session.close()
        host.close()

    assert got == expected
    assert store.read(session_id).conversation.context_ids() == whole.conversation.context_ids()


def test_another_models_conversation_is_read_anew_from_its_text(host, tmp_path, store, session):
    ask(session, "Hello <|end|> there")
    session.close()
    directory = save_checkpoint(tmp_path / "other", tiny_model("qwen3", seed=5), CHATML)
    byte_fallback().save(str(directory / "tokenizer.json"))

    other = read_chat_model(find_model(str(directory)))
    opened = ChatSession.open(other, host._engine, store, session.session_id)

    name = host.model.name
    assert opened.notes == (f"{name} wrote the last answers here; /model {name} goes on with it.",)
    for turn in opened.conversation.turns():
        assert turn.tokenizer == other.tokenizer.digest
        original = session.conversation.turn(turn.turn_id)
        assert turn.text == original.text
    first, answer = opened.conversation.path()
    clock = datetime.fromtimestamp(opened.conversation.created_s)
    expected = other.format.opening(NewTurn("Hello <|end|> there", clock, "Be brief."))
    assert list(first.token_ids) == expected
    assert answer.token_ids == other.answer_ids(opened.conversation, answer)
    opened.close()
    # Its file still says what the first model read and wrote.
    assert saved_turns(store, session) == list(session.conversation.turns())


def test_a_conversation_the_model_cannot_take_over_is_let_go(host, store, session, monkeypatch):
    """Its file stayed locked: the next try was told that another kvchat had it open."""
    session.add_user_turn("Hello")
    session.close()

    def refuse(*_: object) -> int:
        raise ModelError("The template takes no such turn.")

    with monkeypatch.context() as patch:
        patch.setattr(saved_conversation, "readopt", refuse)
        with pytest.raises(ModelError, match="no such turn"):
            host.open_session(session.session_id)

    host.open_session(session.session_id).close()


def test_a_message_that_does_not_fit_is_kept_and_stepped_back_from(session, store):
    ask(session, "short")
    tip = session.conversation.tip_id

    [failed] = list(session.ask("x" * 600, answer_options()))

    assert isinstance(failed, AnswerFailed)
    assert isinstance(failed.error, ContextTooLong)
    assert failed.error.exit_code is ExitCode.CONTEXT
    assert session.conversation.tip_id == tip
    assert any(turn.text == "x" * 600 for turn in saved_turns(store, session))
    assert ask(session, "short again").usage.cached.total > 0
    assert_saved(store, session)


def test_a_conversation_of_refused_messages_is_not_the_one_to_go_on_with(host, store):
    """`kvchat -c` went on in the "x" whose only message had been too long."""
    good = host.new_session()
    ask(good, "short")
    good.close()
    refused = host.new_session()
    list(refused.ask("x" * 600, answer_options()))
    refused.close()
    newest = time.time() + 60
    os.utime(store.directory / f"{refused.session_id}.jsonl", (newest, newest))

    assert store.ids()[0] == refused.session_id
    assert store.latest() == good.session_id


def test_without_a_store_nothing_is_written(host: ChatHost, store: SessionStore) -> None:
    before = store.ids()
    session = ChatSession.new(host.model, host._engine, None, system="S", title="T")
    ask(session, "secret")
    ChatSession.fork_of(host.model, host._engine, None, session.conversation)

    assert store.ids() == before


def test_no_file_name_holds_a_word_of_the_conversation(host: ChatHost, store: SessionStore) -> None:
    session = host.new_session(title="xylophone")
    ask(session, "xylophone")
    session.close()

    assert not [path for path in store.directory.iterdir() if "xylophone" in path.name]


KILLED_MID_ANSWER = """
import pathlib, sys, threading, time
from kvchat.chat.events import AnswerText
from kvchat.chat.store import SessionStore
from support.tiny_host import answer_options, tiny_host
pace = threading.Event()
host = tiny_host(pathlib.Path(sys.argv[1]), SessionStore(pathlib.Path(sys.argv[2])),
                 before_step=lambda: pace.wait(0.02))
host.wait_until_ready()
session = host.new_session(system="S")
reply = session.ask("Count for ever", answer_options(max_tokens=400))
for event in reply:
    if isinstance(event, AnswerText):
        print(time.monotonic(), reply.num_tokens)
"""


def test_kill_9_in_mid_answer_costs_at_most_the_last_second(checkpoint, host, tmp_path):
    writer = start_python(KILLED_MID_ANSWER, checkpoint, tmp_path)
    assert writer.stdout is not None
    seen: list[tuple[float, int]] = []
    try:
        while not seen or seen[-1][0] - seen[0][0] < 4.0:
            at_s, count = writer.stdout.readline().split()
            seen.append((float(at_s), int(count)))
    finally:
        killed_s = time.monotonic()
        writer.kill()
        writer.communicate()

    store = SessionStore(tmp_path)
    conversation = store.read(store.latest()).conversation
    question, answer = conversation.path()
    assert question.text == "Count for ever"
    assert answer.finish is None
    sure = max(count for at_s, count in seen if at_s < killed_s - 3.0)
    assert len(answer.token_ids) >= sure > 1
    whole = host.new_session(system="S")
    ask(whole, "Count for ever", max_tokens=400)
    assert whole.conversation.turn(2).token_ids[: len(answer.token_ids)] == answer.token_ids
    whole.close()
    session = ChatSession.open(host.model, host._engine, store, store.latest())
    assert ask(session, "Go on").usage.prompt_tokens > len(answer.token_ids)
    session.close()


def test_the_file_holds_the_facts_of_each_answer_for_people(session, store):
    ended = ask(session, "facts")
    path = store.directory / f"{session.session_id}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]

    [end] = [line for line in lines if line.get("type") == "end"]
    assert end["finish"] == "length"
    assert end["usage"] == ended.usage.as_dict()
    assert set(end["timing"]) == {
        "load_s",
        "ttft_s",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "total_s",
    }


def test_a_message_is_forgotten_under_every_system_prompt_it_was_put_under(session, store):
    """After /system, /forget took away the copy under the new prompt only, and the words stayed on
    the old branch, in the file.
    """
    ask(session, "keep this")
    ask(session, "a secret")
    session.set_system("Be long.")
    ask(session, "a third")
    secret = session.conversation.path()[2]
    assert len(session.conversation.contexts(secret.turn_id)) == 2

    session.forget(secret.turn_id)

    texts = [turn.text for turn in session.conversation.turns() if turn.role is Role.USER]
    assert texts == ["keep this", "keep this"]
    assert session.conversation.path()[0].system == "Be long."
    assert_saved(store, session)
    assert b"secret" not in (store.directory / f"{session.session_id}.jsonl").read_bytes()
