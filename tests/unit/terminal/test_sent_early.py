"""A message is on the disk the moment it is sent, also while the model still loads."""

from collections.abc import Callable
from pathlib import Path

from kvchat.chat.store import SessionStore
from support.chat_screen import ChatScreen

StartChat = Callable[..., ChatScreen]


def _saved_texts(sessions: Path) -> list[str]:
    store = SessionStore(sessions)
    return [turn.text for turn in store.read(store.latest()).conversation.path()]


def test_a_message_typed_before_the_prompt_is_there_is_saved_too(start_chat, tmp_path):
    chat = start_chat("--loading", str(tmp_path / "never"))
    chat.enter("typed ahead").wait_for("Esc stops").abandon()

    assert _saved_texts(tmp_path / "sessions") == ["typed ahead"]


def test_a_message_waits_where_the_model_cannot_be_loaded(start_chat, tmp_path):
    """It stood unanswered in the conversation, and the next one behind it."""
    loaded = tmp_path / "loaded"
    start_chat().enter("hello").wait_for("You said 'hello' (0).").enter("/exit").finish()
    chat = start_chat("--continue", "--fail", "--loading", str(loaded))
    chat.enter("a whole message").wait_for("Esc stops").enter("and another").wait_for("1 queued")
    loaded.touch()

    assert chat.finish() == 3
    assert _saved_texts(tmp_path / "sessions") == ["hello", "You said 'hello' (0)."]
    assert _saved_waiting(tmp_path / "sessions") == ("a whole message", "and another")
    assert chat.text.count("The weights are broken.") == 1
    assert "2 messages were not sent. kvchat -c offers them again." in chat.text
    assert "Not sent:\n\na whole message\nand another\n" in chat.text
    again = start_chat("--continue").wait_for_shown("❯ a whole message")
    again.type("\r").wait_for("You said 'a whole message' (0).")


def test_a_first_message_waits_where_the_model_cannot_be_loaded(start_chat, tmp_path):
    loaded = tmp_path / "loaded"
    chat = start_chat("--fail", "--loading", str(loaded))
    chat.enter("a whole message").wait_for("Esc stops")
    loaded.touch()

    assert chat.finish() == 3
    assert _saved_texts(tmp_path / "sessions") == []
    assert "1 message was not sent. kvchat -c offers it again." in chat.text
    start_chat("--continue").wait_for_shown("❯ a whole message")


def test_esc_stops_a_message_that_waits_for_the_model(start_chat, tmp_path):
    """The model may load for minutes."""
    loaded = tmp_path / "loaded"
    chat = start_chat("--loading", str(loaded))
    chat.enter("too early").wait_for("Esc stops").type("\x1b").wait_for("\nstopped")
    chat.enter("/tree").wait_for("1 you: too early")
    loaded.touch()
    chat.enter("/continue").wait_for("You said 'too early' (0).")


def test_the_time_of_an_answer_counts_from_when_the_model_is_there(start_chat, tmp_path):
    loaded = tmp_path / "loaded"
    chat = start_chat("--loading", str(loaded))
    chat.enter("hello").wait_for("scripted · hello · reading weights 25% · Esc stops")
    assert "reading 1" not in chat.shown
    loaded.touch()
    chat.wait_for("You said 'hello' (0).").wait_for("context 46/32k")


def test_nothing_is_saved_of_a_chat_that_saves_nothing(start_chat, tmp_path):
    chat = start_chat("--loading", str(tmp_path / "never"), is_saved=False)
    chat.enter("a secret").wait_for("Esc stops").type("\x1b").wait_for("\nstopped")
    chat.enter("/exit")
    assert chat.finish() == 0
    assert not list(tmp_path.rglob("*"))


def _saved_waiting(sessions: Path) -> tuple[str, ...]:
    store = SessionStore(sessions)
    return store.read(store.latest()).conversation.waiting


def test_what_is_typed_ahead_of_an_answer_is_offered_after_a_kill(start_chat, tmp_path):
    """It was in the input history alone: the conversation went on without it."""
    chat = start_chat()
    chat.enter("slow 3000").wait_for("line-0004")
    chat.enter("and then this").wait_for_shown("queued 1: and then this")
    chat.enter("and that").wait_for_shown("queued 2: and that")
    chat.abandon()

    assert _saved_waiting(tmp_path / "sessions") == ("and then this", "and that")
    again = start_chat("--continue", columns=100)
    again.wait_for("2 messages of yours were not sent.").wait_for_shown("❯ and then this")
    again.type("\r").wait_for("You said 'and then this' (0).").wait_for_shown("❯ and that")
    again.wait_for("first token").enter("/set seed 5").wait_for("seed is 5.")
    assert _saved_waiting(tmp_path / "sessions") == ("and that",)
    again.wait_for(lambda _: again.shown.rpartition("seed is 5.")[2].count("❯ and that") == 1)
    again.type("\r").wait_for("You said 'and that' (0).").enter("/exit").finish()
    assert _saved_waiting(tmp_path / "sessions") == ()
    assert "not sent" not in again.text.partition("You said 'and then this'")[2]


def test_an_offered_message_can_be_dropped(start_chat: StartChat, tmp_path: Path) -> None:
    chat = start_chat()
    chat.enter("slow 3000").wait_for("line-0004")
    chat.enter("unwanted").wait_for_shown("queued 1: unwanted").enter("/exit")
    chat.wait_for("1 message was not sent. kvchat -c offers it again.").finish()

    again = start_chat("--continue")
    again.wait_for_shown("❯ unwanted").type("\x03")
    again.wait_for(lambda _: "❯ unwanted" not in again.shown).enter("hello")
    again.wait_for("You said 'hello' (0).").enter("/exit").finish()
    assert _saved_waiting(tmp_path / "sessions") == ()
    assert "unwanted" not in _saved_texts(tmp_path / "sessions")


def test_the_first_message_is_saved_while_tools_start(start_chat, tmp_path):
    """Killed in that time, there was no conversation to continue."""
    (tmp_path / "work").mkdir()
    tools = ("--tools", str(tmp_path / "work"), "--late")
    chat = start_chat(*tools, str(tmp_path / "never"))
    chat.wait_for("starting MCP servers").enter("my name is Ada").wait_for("queued 1")
    chat.abandon()

    assert _saved_waiting(tmp_path / "sessions") == ("my name is Ada",)
    started = tmp_path / "started"
    started.touch()
    again = start_chat(*tools, str(started), "--continue").wait_for_shown("❯ my name is Ada")
    again.type("\r").wait_for("You said 'my name is Ada' (0).").wait_for("first token")
    again.enter("/tools").wait_for("echo").enter("/exit").finish()
    assert _saved_texts(tmp_path / "sessions")[0] == "my name is Ada"
    assert "were not offered" not in again.text


def test_a_message_that_is_taken_back_leaves_no_conversation(start_chat, tmp_path):
    (tmp_path / "work").mkdir()
    chat = start_chat("--tools", str(tmp_path / "work"), "--late", str(tmp_path / "never"))
    chat.wait_for("starting MCP servers").enter("a mistake").wait_for_shown("queued 1: a mistake")
    chat.type("\x1b[A").wait_for_shown("editing 1").type("\x15\r")
    chat.wait_for(lambda _: "a mistake" not in chat.shown).enter("/exit").finish()
    assert not list((tmp_path / "sessions").glob("*.jsonl"))


def test_what_is_typed_ahead_of_an_answer_outlives_a_kill(start_chat, tmp_path):
    history = tmp_path / "history"
    chat = start_chat("--history", str(history))
    chat.enter("slow 3000").wait_for("line-0004").enter("and then this").wait_for("1 queued")
    chat.abandon()

    again = start_chat("--history", str(history), "--continue")
    again.type("\x1b[A").wait_for_shown("❯ and then this")


def test_a_command_takes_the_place_of_a_message_that_cannot_be_saved(start_chat, tmp_path):
    """/exit was typed after the message that came back, and was sent with it."""
    (tmp_path / "sessions").write_text("no directory")
    chat = start_chat().enter("my name is Ada")
    chat.wait_for("Typing replaces it").wait_for_shown("❯ my name is Ada")
    chat.enter("/exit")
    assert chat.finish() == 0


def test_what_waits_stays_with_its_conversation(start_chat: StartChat, tmp_path: Path) -> None:
    """It went over to the next one, and was offered in both."""
    chat = start_chat()
    chat.enter("slow 3000").wait_for("line-0004").enter("of the first").wait_for_shown("queued 1")
    chat.enter("of the first too").wait_for_shown("queued 2")
    chat.abandon()

    again = start_chat("--continue").wait_for_shown("❯ of the first")
    again.enter("/new").wait_for("A new conversation.")
    again.wait_for(lambda _: "❯ of the first" not in again.shown)
    again.enter("hello").wait_for("You said 'hello' (0).").wait_for("first token")
    assert "❯ of the first" not in again.shown
    again.enter("/resume slow").wait_for("2 messages of yours were not sent.")
    again.wait_for_shown("❯ of the first").enter("/exit").finish()


def test_a_refused_message_that_is_dropped_is_not_offered(start_chat, tmp_path):
    """No turn took it off the list, so it came again in the next chat, and in each after it."""
    binary = tmp_path / "binary.dat"
    binary.write_bytes(b"\0")
    chat = start_chat(columns=120)
    chat.enter("slow 3000").wait_for("line-0004").enter(f"see @{binary}").wait_for_shown("queued 1")
    chat.enter("slow 2999").wait_for_shown("queued 2").type("\x1b")
    chat.wait_for(lambda text: "line-" in text.partition("❯ slow 2999")[2])
    assert "can be attached." in " ".join(chat.text.split())
    assert _saved_waiting(tmp_path / "sessions") == ()
    chat.abandon()


def test_what_waits_behind_a_message_that_is_too_long_outlives_a_kill(start_chat, tmp_path):
    """The file of a conversation in which all was refused is deleted, and what waited with it."""
    (tmp_path / "work").mkdir()
    started = tmp_path / "started"
    tools = ("--tools", str(tmp_path / "work"), "--late", str(started), "--context", "300")
    chat = start_chat(*tools, columns=120)
    chat.enter("y" * 400).wait_for_shown("queued 1").enter("slow 30").wait_for_shown("queued 2")
    chat.enter("and this").wait_for_shown("queued 3")
    started.touch()
    chat.wait_for("the context holds 300").wait_for("line-0004")
    chat.abandon()
    assert _saved_waiting(tmp_path / "sessions") == ("and this",)


def test_forgetting_keeps_what_waits(start_chat: StartChat, tmp_path: Path) -> None:
    chat = start_chat()
    chat.enter("hello").wait_for("first token").enter("slow 3000").wait_for("line-0004")
    chat.enter("later").wait_for_shown("queued 1: later")
    chat.abandon()

    again = start_chat("--continue").wait_for_shown("❯ later")
    again.enter("/forget last").wait_for("Forget the last").type("y").wait_for_shown("❯ yes")
    again.type("\r").wait_for("Forgotten: the last turn")
    again.wait_for_shown("❯ later")
    again.abandon()
    assert "slow 3000" not in _saved_texts(tmp_path / "sessions")
    assert _saved_waiting(tmp_path / "sessions") == ("later",)


def test_what_waits_behind_a_first_message_that_is_too_long_is_saved(start_chat, tmp_path):
    """The refused message's conversation went with its file, and what waited was in that file."""
    loaded = tmp_path / "loaded"
    chat = start_chat("--loading", str(loaded), "--gate", str(tmp_path / "never"))
    chat.wait_for("reading weights").paste("x" * 33_000).enter("").wait_for("Esc stops")
    chat.enter("gated 60").wait_for("queued 1: gated 60").enter("third").wait_for("queued 2: third")
    loaded.touch()
    chat.wait_for("word20").abandon()

    store = SessionStore(tmp_path / "sessions")
    [only] = store.ids()
    conversation = store.read(only).conversation
    assert [turn.text for turn in conversation.turns() if turn.is_message] == ["gated 60"]
    assert conversation.waiting == ("third",)
