"""Whole screens: a first start, a resumed chat, the tree, the list of conversations, and a full
context.
"""

import os
import time
from collections.abc import Callable

import pytest

from kvchat.chat.store import SessionStore
from support.chat_screen import ChatScreen
from support.saved_sessions import save_chat

StartChat = Callable[..., ChatScreen]


def _screen(chat: ChatScreen) -> list[str]:
    """The visible rows from the first command or message on, without the empty ones."""
    rows = [row for row in chat.shown.split("\n") if row and "/help" not in row]
    return [row for row in rows if not row.startswith("a model on this machine")]


def _talk(start_chat: StartChat) -> None:
    chat = start_chat()
    chat.enter("prose 60").wait_for("word59").wait_for("first token")
    chat.enter("hello").wait_for(lambda text: text.count("first token") == 2)
    chat.enter("/exit").finish()


_OPENED = [
    "prose 60 · last of 2 turns (/show chat)",  # the picker says 2 turns, and so does /context
    "❯ hello",
    "You said 'hello' (0).",
    "cold: 485 tokens to read, about 0.5 s",
]
RESUMED = {
    (100, 30): [*_OPENED, "❯", "scripted · prose 60 · context 485/32k · cold, about 0.5 s"],
    (40, 12): [*_OPENED, "❯", "context 485/32k · cold, about 0.5 s"],
}
TREE = {
    (100, 30): [
        "❯ /tree",
        "1 you: prose 60 · cold 0.1 s",
        "  model: word0 word1 word2 word3 word4 word5 word6 word7 word8 word9 word10 word11 wo… "
        "· cold 0.4 s",
        "2 you: hello · cold 0.5 s",
        "  model: You said 'hello' (0). · cold 0.5 s ●",
        "❯",
        "scripted · prose 60 · context 485/32k · cold, about 0.5 s",
    ],
    (40, 12): [
        "❯ /tree",
        "1 you: prose 60 · cold 0.1 s",
        "  model: word0 word1 word… · cold 0.4 s",
        "2 you: hello · cold 0.5 s",
        "  model: You said 'hell… · cold 0.5 s ●",
        "❯",
        "context 485/32k · cold, about 0.5 s",
    ],
}
PICKER = {
    (100, 30): [
        "❯ /resume",
        "Go on with  type to search, Enter picks, Esc cancels",
        "  hello · what is a radix tree  cold, about 0.1 s · 3 h ago · 2 turns · some model",
        "❯ hello · my cat is Mia  cold, about 0.1 s · 6 h ago · 2 turns · some model",
        "  Summarise the minutes of the meeting in Ber…  cold, about 3.9 s · 9 h ago · 1 turn · some model",  # noqa: E501
        "  ┊ my cat is Mia",
        "  ┊ A cat named Mia.",
        "Ctrl-R renames · Ctrl-X deletes · Ctrl-O shows 1 one-shot",
        "scripted",
    ],
    (40, 12): [
        "❯ /resume",
        "Go on with  Enter picks, Esc cancels",
        "  hello · what is…  cold, about 0.1 s",
        "❯ hello · my cat i…  cold, about 0.1 s",
        "  Summarise the mi…  cold, about 3.9 s",
        "  ┊ my cat is Mia",
        "  ┊ A cat named Mia.",
        "^R rename · ^X delete · ^O one-shots",
        "scripted",
    ],
}


FIRST_START = {
    (100, 30): [
        "kvchat 0.1.0 · scripted · /help for help · nothing is saved",
        "a model on this machine; try: a question · /file PATH · /help keys",
        "",
        "❯",
        "scripted",
    ],
    (40, 12): [
        "kvchat 0.1.0 · scripted · /help for help",
        "nothing is saved",
        "a model on this machine; try: a question",
        "",
        "❯",
        "scripted",
    ],
}
_LONG = "this is longer than what the context of 300 tokens still has room for, with all before it"
FULL = {
    (100, 30): [
        f"❯ {_LONG}",
        "",
        "The prompt has 328 tokens, and the context holds 300. /compact lets a summary take the "
        "place of",
        "older messages, /new begins another conversation, /rewind goes back. /set context-policy "
        "drop or",
        "compact makes room by itself from now on.",
        "",
        "Your message is in the prompt again. Typing replaces it; Up returns it.",
        "",
        f"❯ {_LONG}",
        "scripted · lines 8 · context 219/300 · ready: 208 of 219 on device",
    ],
    (40, 12): [
        "messages, /new begins another",
        "conversation, /rewind goes back. /set",
        "context-policy drop or compact makes",
        "room by itself from now on.",
        "",
        "Your message is in the prompt again.",
        "Typing replaces it; Up returns it.",
        "",
        "❯ this is longer than what the context o",
        "  f 300 tokens still has room for, with",
        "  all before it",
        "ready: 208 of 219 on device",
    ],
}
NEARLY_FULL = {
    (100, 30): [
        "",
        "❯",
        "scripted · ready: 240 of 243 on device · context 243/300, 81% full: /compact, /new or "
        "/rewind",
    ],
    (40, 12): ["", "❯", "81% full: /compact /new /rewind"],
}


def _whole(chat: ChatScreen) -> list[str]:
    return chat.shown.rstrip().split("\n")


@pytest.mark.parametrize("size", [(100, 30), (40, 12)])
def test_a_first_start(start_chat: StartChat, size: tuple[int, int]) -> None:
    chat = start_chat(is_saved=False, columns=size[0], rows=size[1])
    chat.wait_for(lambda _: _whole(chat) == FIRST_START[size])


@pytest.mark.parametrize("size", [(100, 30), (40, 12)])
def test_a_full_context(start_chat: StartChat, size: tuple[int, int]) -> None:
    chat = start_chat("--context", "300", columns=size[0], rows=size[1])
    chat.enter("lines 8").wait_for("first token").enter(_LONG)
    chat.wait_for(lambda _: _whole(chat)[-len(FULL[size]) :] == FULL[size])


def test_a_message_that_no_context_holds_is_said_to_be_too_long(start_chat: StartChat) -> None:
    """/compact, /new and /rewind were named, and none of them helped."""
    chat = start_chat("--context", "300", is_saved=False, columns=120)
    said = (
        "Your message alone has 400 tokens, and the context holds 300 with what stands around it: "
    )
    for _ in range(2):  # an empty conversation, and one with messages
        chat.enter("word " * 80)
        chat.wait_for(lambda text: f"{said}send a part of it." in " ".join(text.split()))
        chat.type("\x03").enter("hello").wait_for("You said 'hello'")
    assert "/compact" not in chat.text


def test_a_system_prompt_that_leaves_no_room_is_named(start_chat: StartChat) -> None:
    """It was said that the message alone was too long, whose one word has five tokens."""
    chat = start_chat("--context", "300", is_saved=False, columns=120)
    said = "The system prompt has 294 tokens, and the context holds 300 in all: /system sets a"
    chat.enter(f"/system {'word ' * 59}").enter("hello")
    chat.wait_for(lambda text: f"{said} shorter one." in " ".join(text.split()))
    chat.type("\x03").enter("/system clear").enter("hello").wait_for("You said 'hello'")


@pytest.mark.parametrize("size", [(100, 30), (40, 12)])
def test_a_nearly_full_context(start_chat: StartChat, size: tuple[int, int]) -> None:
    chat = start_chat("--context", "300", columns=size[0], rows=size[1])
    chat.enter("lines 9").wait_for("first token")
    chat.wait_for(lambda _: _whole(chat)[-len(NEARLY_FULL[size]) :] == NEARLY_FULL[size])


@pytest.mark.parametrize("size", [(100, 30), (40, 12)])
def test_a_resumed_chat_and_its_tree(start_chat: StartChat, size: tuple[int, int]) -> None:
    _talk(start_chat)
    chat = start_chat("--continue", columns=size[0], rows=size[1])
    chat.wait_for(lambda _: _screen(chat) == RESUMED[size])

    chat.enter("/tree").wait_for(lambda _: _screen(chat)[-len(TREE[size]) :] == TREE[size])


@pytest.mark.parametrize("size", [(100, 30), (40, 12)])
def test_the_list_of_conversations(start_chat, tmp_path, size):
    store = SessionStore(tmp_path / "sessions")
    said = [
        ("hello", "Hello to you.", "what is a radix tree", "A tree of prefixes."),
        ("hello", "Hello again.", "my cat is Mia", "A cat named Mia."),
        ("Summarise the minutes of the meeting in Bergen", "It was long. " * 300),
        ("hello", "Hello, script."),
    ]
    for number, texts in enumerate(said):
        session_id = save_chat(store, *texts, is_one_shot=number == 3)
        past_s = time.time() - (number + 1) * 3 * 3600 - 60
        os.utime(store.directory / f"{session_id}.jsonl", (past_s, past_s))
    chat = start_chat(columns=size[0], rows=size[1])
    chat.enter("/resume").wait_for_shown("cold, about 3.9 s").type("\x1b[B")

    chat.wait_for(lambda _: _screen(chat) == PICKER[size])
