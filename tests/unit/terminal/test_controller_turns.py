"""Moving about in a conversation's tree: by redo, under another prompt, and by number."""

import asyncio
import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import ChatModel
from kvchat.chat.controller import ChatController
from kvchat.chat.conversation import ROOT
from kvchat.chat.host import ChatHost
from kvchat.chat.reply import Reply
from kvchat.core.errors import ContextTooLong, SessionNotFound, UsageError
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands import Invocation
from kvchat.terminal.dialogue import Dialogue
from kvchat.terminal.line_view import LineView
from kvchat.terminal.paint import Painter, Row
from kvchat.terminal.script_commands import ScriptCommands, ScriptPage
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look
from kvchat.terminal.view import Choice, LiveState, PickerActions
from support.script_commands import SureCommands, carry_out
from support.scripted_engine import Script, scripted_build
from support.tiny_host import finish

SUPERSCRIPT, ABSURD = "²", "9" * 5000


def do(controller: ChatController, line: str, page_class: type[ScriptPage] = ScriptPage) -> str:
    """Carry out a command, saying yes where it asks; return the questions and what it said."""
    return carry_out(controller, line, SureCommands, page_class)


def ask(controller: ChatController, *texts: str) -> None:
    for text in texts:
        finish(controller.ask(text))


def path_texts(controller: ChatController) -> list[str]:
    return [turn.text for turn in controller.require_conversation().path()]


def test_a_bare_number_after_retry_is_said_to_be_no_message(controller: ChatController) -> None:
    """/retry 1 made an answer to the last message, while /edit 1 took the first."""
    ask(controller, "one", "two", "three")
    said = do(controller, "/retry 2")
    assert "2 more answers to the last message" in said
    assert "/rewind 2 goes back to message 2" in said
    assert do(controller, "/retry 3") == do(controller, "/retry 4") == ""  # no earlier message's
    assert do(controller, "/retry -n 2") == do(controller, "/retry") == ""


def test_show_model_names_the_command_that_shows_more(controller: ChatController) -> None:
    controller.host.wait_until_ready()
    shown, *_, more = do(controller, "/show model").splitlines()
    assert shown.startswith("model ")
    assert more == "/model also lists the models on this machine."
    assert do(controller, "/model").startswith(
        do(controller, "/show model").removesuffix(f"{more}\n")
    )


@pytest.mark.parametrize("name", ["max_tokens", "Max-Tokens", "--max-tokens"])
def test_a_setting_may_be_spelled_as_elsewhere(controller: ChatController, name: str) -> None:
    """/set max_tokens 12 set it, and then: "Something went wrong inside kvchat (KeyError)"."""
    assert do(controller, f"/set {name} 12") == "max-tokens is 12.\n"
    assert do(controller, f"/set {name}") == "max-tokens is 12.\n"
    assert controller.options.max_tokens == 12


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("temperature 9", "temperature is 9, outside the usual 0 to 2: answers may be noise."),
        ("temperature 2", "temperature is 2."),
        ("min-p 1", "min-p is 1, outside the usual 0 to 0.5: answers may be noise."),
        ("min-p -0", "min-p is 0."),
        (
            "repetition-penalty 50",
            "repetition-penalty is 50, outside the usual 0.8 to 2: answers may be noise.",
        ),
        ("top-k 123456789", "top-k is 123456789."),
        ("stats off", "Statistics after answers: off."),
        ("quiet", "Statistics after answers: off."),
        ("verbose", "Statistics after answers: one line."),
    ],
)
def test_a_setting_with_an_unusual_value_says_what_is_usual(controller, setting, said):
    """/set temperature 9 was taken without a word, and made noise of every answer."""
    assert do(controller, f"/set {setting}").replace("\n", " ") == f"{said} "


@pytest.mark.parametrize(
    "setting",
    [
        *(f"temperature {value}" for value in ("-1", "nan", "inf", "1e400", "''", "warm", "0,5")),
        *(f"top-p {value}" for value in ("0", "2", "nan")),
        *(f"top-k {value}" for value in ("-1", "1.5", "9" * 20)),
        *(f"min-p {value}" for value in ("-1", "1.1", "nan")),
        *(f"repetition-penalty {value}" for value in ("0", "-1", "1e9")),
        *(f"seed {value}" for value in ("9" * 29, "0x10", "'1'")),
        *(f"max-tokens {value}" for value in ("0", "-1", "9" * 29, "1e3")),
        "stop ''",
        "think maybe",
        "stats maybe",
        "verbose maybe",
        "= 5",
        "=",
    ],
)
def test_an_absurd_setting_is_refused_and_changes_nothing(controller, setting):
    before = controller.options
    with pytest.raises(UsageError) as refused:
        do(controller, f"/set {setting}")
    assert controller.options == before
    assert not refused.value.message.startswith(" ")


def test_a_sampling_parameter_can_be_unset(controller: ChatController) -> None:
    controller.host.model.sampling_defaults["top_p"] = 0.25
    try:
        do(controller, "/set top-p 0.5")
        assert do(controller, "/set top-p default") == "top-p is 0.25.\n"
    finally:
        del controller.host.model.sampling_defaults["top_p"]


class Recording(ChatController):
    """Refuses every message, and keeps the settings that it would have been answered with."""

    asked_with: tuple[AskOptions, ...] = ()

    def ask(self, text: str, notify: Callable[[], None] | None = None) -> Reply:
        self.asked_with = (*self.asked_with, self.options)
        raise UsageError("Refused.")


def test_a_message_is_answered_with_what_was_set_before_it(controller: ChatController) -> None:
    """Where a line took the chat a moment, what was typed meanwhile came at once, and the message
    overtook the /set that was typed before it.
    """
    recording = Recording(controller.host, lambda *_: controller.host, None, AskOptions())
    view = LineView(sys.stdin, io.StringIO(), Painter(Look(is_plain=True)), 80, "vi")

    async def type_ahead() -> None:
        dialogue = Dialogue(recording, view, build_registry(), StatsLevel.OFF)
        dialogue.hear(recording.host.wait_until_ready())
        worker = asyncio.create_task(dialogue.work())
        while dialogue.is_at_work or not recording.asked_with:
            dialogue.stop_editing()  # as any line does, it wakes what sends messages
            dialogue.accept("/set seed 5")
            dialogue.accept("hello")
            await asyncio.sleep(0.01)
        worker.cancel()

    asyncio.run(type_ahead())
    assert recording.asked_with[0].seed == 5


def test_a_command_behind_a_message_that_begins_in_a_moment(controller: ChatController) -> None:
    """It waited for "your message before it, and that for /.": no command held anything."""
    shown = io.StringIO()
    view = LineView(sys.stdin, shown, Painter(Look(is_plain=True)), 80, "vi")

    async def type_ahead() -> None:
        dialogue = Dialogue(controller, view, build_registry(), StatsLevel.OFF)
        dialogue.accept("hello")
        dialogue.accept("/pin notes")

    asyncio.run(type_ahead())
    assert "/pin waits for your message before it.\n" in shown.getvalue()


class WatchedView(LineView):
    """Writes down every toolbar and what a picker offers; its user picks the first choice."""

    def __init__(self) -> None:
        super().__init__(sys.stdin, io.StringIO(), Painter(Look(is_plain=True)), 80, "vi")
        self.bars: list[str] = []
        self.choices: list[str] = []

    def show(self, state: LiveState) -> None:
        self.bars.append(state.toolbar(200))

    def write(self, rows: Sequence[Row], state: LiveState | None = None) -> None:
        if state is not None:
            self.show(state)

    async def choose(
        self,
        title: str,
        choices: Sequence[Choice],
        current: int = 0,
        actions: PickerActions | None = None,
    ) -> int | None:
        self.choices += [choice.detail for choice in choices]
        return 0


async def _answer(controller: ChatController, view: LineView, *lines: str) -> None:
    dialogue = Dialogue(controller, view, build_registry(), StatsLevel.OFF)
    dialogue.hear(controller.host.wait_until_ready())
    worker = asyncio.create_task(dialogue.work())
    for line in lines:
        dialogue.accept(line)
        while dialogue.is_at_work:
            await asyncio.sleep(0.005)
    worker.cancel()


def test_the_toolbar_counts_while_an_answer_fills_the_context(model: ChatModel) -> None:
    """It showed the size of the prompt, 40/1k, until the answer had ended, at 927."""
    build = scripted_build(model, lambda *_: Script("word " * 40, step_s=0.002))
    host = ChatHost(model, build, None)  # type: ignore[arg-type]
    controller = ChatController(host, lambda *_: host, None, AskOptions())
    view = WatchedView()
    asyncio.run(_answer(controller, view, "hello"))
    counts = [int(found[1]) for bar in view.bars if (found := re.search(r"context (\d+)/", bar))]

    assert counts == sorted(counts)
    assert len(set(counts)) > 4
    assert counts[-1] == len(controller.context_ids)
    host.close()


def test_the_tokens_of_megabytes_are_not_counted_to_refuse_them(model: ChatModel) -> None:
    """The screen stood still for the minute that this took."""
    build = scripted_build(model, lambda *_: Script("yes"), max_context=300)
    host = ChatHost(model, build, None)  # type: ignore[arg-type]
    shown = io.StringIO()
    view = LineView(sys.stdin, shown, Painter(Look(is_plain=True)), 200, "vi")
    controller = ChatController(host, lambda *_: host, None, AskOptions())
    asyncio.run(_answer(controller, view, "word " * 2000, "word " * 400))

    holds = "and the context holds 300 with what stands around it: send a part of it."
    assert f"Your message alone has 10,000 characters, {holds}" in shown.getvalue()
    assert re.search(rf"Your message alone has [\d,]+ tokens, {holds}", shown.getvalue())
    host.close()


def test_a_refused_message_is_at_work_while_its_tokens_are_counted(model, monkeypatch):
    """A pipe that ended in this moment closed the chat before the reason was written."""
    build = scripted_build(model, lambda *_: Script("yes"), max_context=300)
    host = ChatHost(model, build, None)  # type: ignore[arg-type]
    controller = ChatController(host, lambda *_: host, None, AskOptions())
    view = WatchedView()
    dialogue = Dialogue(controller, view, build_registry(), StatsLevel.OFF)
    seen: list[bool] = []

    def count(text: str) -> int:
        seen.append(dialogue.is_at_work)
        return len(text)

    async def answer() -> None:
        dialogue.hear(host.wait_until_ready())
        worker = asyncio.create_task(dialogue.work())
        dialogue.accept("word " * 400)
        while dialogue.is_at_work:
            await asyncio.sleep(0)
        worker.cancel()

    monkeypatch.setattr(controller, "num_tokens", count)
    asyncio.run(answer())

    assert seen
    assert all(seen)
    host.close()


def test_answers_to_choose_from_are_told_apart_by_what_they_say(model: ChatModel) -> None:
    """Each began with the same <think>, and nothing else was to be seen of it."""
    build = scripted_build(model, lambda _, n: Script(f"<think>Let me see.</think>Answer {n}"))
    host = ChatHost(model, build, None)  # type: ignore[arg-type]
    view = WatchedView()
    controller = ChatController(host, lambda *_: host, None, AskOptions())
    asyncio.run(_answer(controller, view, "hello", "/retry -n 2"))

    assert view.choices == ["Answer 0", "Answer 1"]
    host.close()


def test_think_alone_shows_the_state_and_changes_nothing(controller: ChatController) -> None:
    """It read as /think on does, and was an error for models that cannot be told to."""
    said = do(controller, "/think")
    assert said.startswith("Thinking is auto. ")
    assert "next message" not in said
    assert controller.options == AskOptions()


def test_list_lists_models_as_elsewhere(controller: ChatController) -> None:
    """It opened the list of conversations; /list of other programs lists models."""
    controller.host.wait_until_ready()
    assert do(controller, "/list") == do(controller, "/model")


# Redo


def test_redo_goes_from_a_question_to_its_answer(controller: ChatController) -> None:
    """With the tip on a question it went on to the next question, whose answer it left out."""
    ask(controller, "one", "two")
    controller.place.move(1)

    assert controller.place.redo()
    assert controller.require_conversation().tip_id == 2
    assert controller.place.redo()
    assert controller.require_conversation().tip_id == 4
    assert not controller.place.redo()


def test_redo_says_in_one_line_what_came_back(controller: ChatController) -> None:
    """It said "one: 1 earlier turn" and printed the last exchange again, however long."""
    ask(controller, "one", "two", "three")

    do(controller, "/undo")
    assert do(controller, "/redo") == "Back after: three  (/undo steps back)\n"
    do(controller, "/undo 2")
    assert do(controller, "/redo").startswith("Back after: three, the last of 2 messages  (")
    controller.place.move(controller.place.user_turns[-1].turn_id)
    assert do(controller, "/redo").startswith("Back after: the answer You said three.  (")


# Another system prompt


def test_a_message_being_edited_is_edited_under_the_new_prompt(controller: ChatController) -> None:
    """/edit 2, /system X: what was sent went below the old prompt's branch."""
    ask(controller, "one", "two", "three")
    do(controller, "/edit 2")

    do(controller, "/system Be brief.")
    assert controller.place.editing == "editing 2"
    ask(controller, "another two")

    assert path_texts(controller) == [
        "one",
        "You said one.",
        "another two",
        "You said another two.",
    ]
    assert controller.require_conversation().path()[0].system == "Be brief."
    assert controller.place.editing == ""


@pytest.mark.parametrize("texts", [("one", "two"), ("one",)])
def test_redo_does_not_go_back_to_the_old_prompt(controller, texts):
    """/undo, /system X, /redo went on under the prompt that had just been replaced."""
    ask(controller, *texts)
    do(controller, "/undo")
    before = path_texts(controller)

    do(controller, "/system Be brief.")

    assert not controller.place.redo()
    assert path_texts(controller) == before
    ask(controller, "three")
    assert controller.require_conversation().path()[0].system == "Be brief."
    assert controller.require_conversation().path()[0].parent_id == ROOT


# Numbers


def test_a_turn_is_switched_to_by_the_number_that_the_tree_shows(controller):
    """After /forget had left a gap, /switch refused the last turns and broke down on those gone."""
    ask(controller, "one", "two")
    controller.place.move(2)
    ask(controller, "three")
    controller.place.forget(3)

    assert "2 you: three" in do(controller, "/tree")
    controller.place.move(2)
    do(controller, "/switch 2")
    assert controller.require_conversation().tip_id == 6
    for number in ("3", "4", "0", "2.2", SUPERSCRIPT, ABSURD):
        with pytest.raises(UsageError, match="is no message"):
            do(controller, f"/switch {number}")
    assert controller.require_conversation().tip_id == 6


@pytest.mark.parametrize("number", [SUPERSCRIPT, ABSURD])
@pytest.mark.parametrize("command", ["/undo", "/rewind", "/edit", "/retry -n", "/resume"])
def test_what_only_looks_like_a_number_is_refused_in_a_sentence(controller, command, number):
    """A superscript is a digit to Python and no number; thousands of digits are none either."""
    ask(controller, "one")

    with pytest.raises((UsageError, SessionNotFound)):
        do(controller, f"{command} {number}")


# Settings


def test_a_system_prompt_that_leaves_no_room_is_refused(controller: ChatController) -> None:
    """It was set, and then no message fitted any more."""
    ask(controller, "one")
    limit = controller.host.ready.context_limit  # type: ignore[union-attr]

    with pytest.raises(UsageError, match=f"tokens, and the context holds {limit:,}"):
        do(controller, f"/system {'x ' * limit}")

    assert controller.require_conversation().system is None


@pytest.mark.parametrize(
    ("name", "answer"),
    [("temp", "Did you mean temperature?"), ("topp", "Did you mean top-p?"), ("foo", "There are:")],
)
def test_a_setting_that_does_not_exist_names_the_closest(controller, name, answer):
    """/set temp 0.5 listed nine names."""
    with pytest.raises(UsageError) as caught:
        do(controller, f"/set {name} 1")
    assert answer in str(caught.value)


@pytest.mark.parametrize("size", [70_000, 33_000], ids=["chat", "engine"])
def test_an_edit_that_is_refused_leaves_the_conversation_where_it_was(controller, size):
    """/edit 1 with too long a text moved back before message 1, and the next line replaced it."""
    ask(controller, "one", "two")
    before = path_texts(controller)
    lines = ScriptCommands(
        controller,
        ScriptPage(lambda text: None, Painter(Look(has_colour=False, is_plain=True)), 200),
        build_registry(),
        StatsLevel.OFF,
    )
    line = lines.registry.parse(f"/edit 1 {'x' * size}")
    assert isinstance(line, Invocation)
    request = lines.carry_out(line)
    assert request is not None
    with suppress(ContextTooLong):
        list(request.ask())

    assert path_texts(controller) == before
    assert controller.place.editing == ""
    ask(controller, "three")
    assert path_texts(controller)[4] == "three"


# Messages that are refused


def test_a_message_that_does_not_fit_takes_no_number(controller: ChatController) -> None:
    """It stayed in /tree as message 2 with the seconds of its reading, and the next one was 3."""
    ask(controller, "one")
    num_turns = len(controller.require_conversation())
    limit = controller.host.wait_until_ready().context_limit
    controller.host.model = replace(controller.host.model, max_context=limit)
    with pytest.raises(ContextTooLong, match=r"The prompt has 33,.* the context holds 32,768\."):
        controller.ask("x" * 33_000)

    assert len(controller.require_conversation()) == num_turns
    ask(controller, "two")
    assert "2 you: two" in do(controller, "/tree")


def test_before_the_first_message_there_may_be_others(controller: ChatController) -> None:
    """/edit said "There is no message yet." after /undo."""
    with pytest.raises(UsageError, match="no message yet"):
        controller.place.user_turn("")
    ask(controller, "one")
    controller.place.undo()
    with pytest.raises(UsageError, match="No message is before this place"):
        controller.place.user_turn("1")


def test_more_undone_than_there_is_says_where_that_ends(controller: ChatController) -> None:
    """`/undo 99` went back before the first of two messages without a word about the number."""
    ask(controller, "one")
    ask(controller, "two")
    assert do(controller, "/undo 99") == "Back before the first message: one  (/redo returns)\n"
    do(controller, "/redo")
    assert do(controller, "/undo 2") == "Back before: one  (/redo returns)\n"


def test_a_conversation_stepped_back_to_its_beginning_can_be_resumed(controller):
    """No list had it: only `kvchat -c` found it, as long as it was the last one."""
    ask(controller, "one")
    session_id = controller.require_session().session_id
    do(controller, "/undo")
    controller.begin_new()
    do(controller, "/resume one")

    assert controller.require_session().session_id == session_id


def test_a_format_is_refused_by_the_name_of_the_file_too(controller, tmp_path):
    """/export notes.pdf wrote Markdown to it."""
    ask(controller, "one")
    with pytest.raises(UsageError, match=r"pdf is no format of /export\."):
        do(controller, f"/export {tmp_path}/notes.pdf")
    assert list(tmp_path.glob("notes*")) == []
