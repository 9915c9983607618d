"""The key table, on prompt_toolkit's own input and no screen."""

import asyncio
import io
from collections.abc import Callable

import pytest
from prompt_toolkit.application.current import set_app
from prompt_toolkit.completion import DummyCompleter
from prompt_toolkit.data_structures import Size
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input

from kvchat.terminal import keys
from kvchat.terminal.keys import DoublePress
from kvchat.terminal.paint import Painter
from kvchat.terminal.prompt import LivePrompt, Terminal
from kvchat.terminal.theme import Look
from kvchat.terminal.unsent import MessageQueue
from kvchat.terminal.view import Choice


@pytest.fixture(autouse=True)
def _patient_fingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer between two presses than fingers do."""
    monkeypatch.setattr(keys, "_TWICE_S", 60.0)
    monkeypatch.setattr(keys, "_ESCAPE_TWICE_S", 60.0)


class _Listener:
    """Writes down what a view tells."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.queue = MessageQueue()
        self.is_answering = False
        self.stoppable_name = "the answer"
        self.is_at_work = False
        self.has_warned = False
        self.view: LivePrompt | None = None

    @property
    def has_queue(self) -> bool:
        return len(self.queue) > 0

    def accept(self, text: str) -> None:
        self.heard.append(("accept", text))

    def stop(self) -> None:
        self.heard.append("stop")

    def notice(self, text: str) -> None:
        self.heard.append(("notice", text))

    def key_pressed(self) -> None:
        pass

    def draft_changed(self, text: str) -> None:
        pass

    def edit_queue(self, current: str, step: int) -> str | None:
        move = self.queue.edit_previous if step < 0 else self.queue.edit_next
        return move(current)

    def stop_editing(self) -> None:
        self.heard.append("stop editing")

    def rewind(self) -> None:
        self.heard.append("rewind")

    def show_sibling(self, step: int) -> None:
        self.heard.append(("sibling", step))

    def toggle_stats(self) -> None:
        self.heard.append("stats")

    def leave(self, code: int) -> None:
        self.quit(code)

    def quit(self, code: int) -> None:
        self.heard.append(("quit", int(code)))
        assert self.view is not None
        self.view.leave()

    def input_ended(self) -> None:
        self.heard.append("end")

    def terminal_lost(self) -> None:
        self.heard.append("lost")

    def failed(self, error: Exception) -> None:
        raise error


class _Stdout(io.StringIO):
    encoding = "utf-8"

    def fileno(self) -> int:
        raise io.UnsupportedOperation


Feed = Callable[[LivePrompt, _Listener, PipeInput], object]


def _press(*keys: str, answering: bool = False, before: Feed | None = None) -> tuple[list, str]:
    """Send keys, each in a read of its own, then leave; return what was told and the prompt."""
    listener = _Listener()
    listener.is_answering = answering

    async def main() -> str:
        with create_pipe_input() as stdin:
            terminal = Terminal(stdin, _Stdout(), lambda: Size(24, 80), "xterm")
            view = LivePrompt(terminal, Painter(Look()), DummyCompleter(), InMemoryHistory(), "vi")
            listener.view = view
            running = asyncio.ensure_future(view.run(listener))
            await _settled(view)
            if before is not None:
                before(view, listener, stdin)
            for key in keys:
                _read(view, stdin, key)
                await _settled(view)
            text = view.buffer.text
            view.leave()
            async with asyncio.timeout(60):
                await running
            return text

    text = asyncio.run(main())
    return listener.heard, text


def _read(view: LivePrompt, stdin: PipeInput, key: str) -> None:
    """Let the prompt read keys now, a lone Esc at its end included: no time passes."""
    stdin.send_text(key)
    with set_app(view._app):
        view._app.key_processor.feed_multiple([*stdin.read_keys(), *stdin.flush_keys()])
        view._app.key_processor.process_keys()


async def _settled(view: LivePrompt) -> None:
    """Draw, and let everything that is ready to run run: history, suggestions, pickers."""
    for _ in range(3):
        view._app.redraw_now()
        for _ in range(10):
            await asyncio.sleep(0)


def test_enter_sends_and_clears() -> None:
    assert _press("hello", "\r") == ([("accept", "hello")], "")


@pytest.mark.parametrize("newline", ["\n", "\x1b\r", "\x1b[13;2u", "\x1b[27;2;13~", "\\\r"])
@pytest.mark.parametrize("answering", [False, True])
def test_every_way_to_a_new_line(newline: str, answering: bool) -> None:
    """Alt-Enter begins with the byte of Esc: while an answer came it used to stop it."""
    heard, text = _press("one", newline, "two", answering=answering)

    assert (heard, text) == ([], "one\ntwo")


def test_a_block_is_sent_when_it_is_closed() -> None:
    heard, _ = _press('"""one', "\r", 'two"""', "\r")

    assert heard == [("accept", "one\ntwo")]


def test_a_pasted_module_with_a_docstring_is_sent_by_enter() -> None:
    """Enter only ever added a line to a text that began with three quotation marks of its own."""
    heard, _ = _press('\x1b[200~"""Words."""\n\nimport os\x1b[201~', "\r")

    assert heard == [("accept", '"""Words."""\n\nimport os')]


def test_a_paste_is_not_sent_by_the_line_ends_in_it() -> None:
    heard, text = _press("\x1b[200~one\r\ntwo\rthree\n\x1b[201~")

    assert (heard, text) == ([], "one\ntwo\nthree\n")


def test_a_long_line_is_edited_where_the_cursor_is() -> None:
    """A key took 1.5 s in a pasted line of a megabyte: all of it was laid out each time."""
    rows: list[str] = []

    def paste(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        view.buffer.insert_text("".join(f"word{number} " for number in range(100_000)))
        view._app.after_render += lambda _: rows.append(_row_of_cursor(view))

    heard, text = _press("end", "\x01", "begin ", before=paste)

    assert heard == []
    assert (text[:12], text[-13:]) == ("begin word0 ", "word99999 end")
    assert any(row.endswith(" end") for row in rows)
    assert any("begin word0 word1 " in row for row in rows)


def _row_of_cursor(view: LivePrompt) -> str:
    screen = view._app.renderer.last_rendered_screen
    if screen is None:
        return ""
    row = screen.data_buffer[screen.get_cursor_position(view._app.layout.current_window).y]
    return "".join(row[column].char for column in range(80)).rstrip()


def test_the_echo_of_a_very_long_message_is_short() -> None:
    def send(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        view.write_turn("some words\n" * 100_000)
        written.append(view._output.stdout.getvalue())

    written: list[str] = []
    _press("", before=send)
    assert "1,100,000 characters in all" in written[0]
    assert written[0].count("\n") < 20


def test_escape_stops_an_answer_and_keeps_what_is_typed() -> None:
    assert _press("half", "\x1b", answering=True) == (["stop"], "half")


def test_escape_alone_does_nothing_while_idle() -> None:
    assert _press("half", "\x1b") == ([], "half")


def test_escape_twice_clears_the_prompt() -> None:
    assert _press("half", "\x1b", "\x1b") == (["stop editing"], "")


@pytest.mark.parametrize("clear", [["\x1b", "\x1b"], ["\x03"]])
def test_what_was_cleared_is_in_the_history(clear: list[str]) -> None:
    assert _press("half a thought", *clear, "\x1b[A")[1] == "half a thought"


def test_escape_twice_on_an_empty_prompt_rewinds() -> None:
    assert _press("\x1b", "\x1b") == (["rewind"], "")


def test_an_arrow_key_is_not_escape() -> None:
    assert _press("ab", "\x1b[D", "X", answering=True) == ([], "aXb")


def test_ctrl_c_stops_an_answer_and_never_leaves() -> None:
    heard, _ = _press("\x03", "\x03", "\x03", answering=True)

    assert heard == ["stop", "stop", "stop"]


def test_ctrl_c_clears_the_line_and_a_second_one_leaves() -> None:
    assert _press("half", "\x03") == (["stop editing", ("notice", "Ctrl-C again leaves.")], "")
    assert _press("half", "\x03", "\x03")[0][-1] == ("quit", 130)


def test_after_a_warning_one_ctrl_c_leaves() -> None:
    """Two warned of what was not saved and said "Leave again", which took two more."""

    def warn(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        listener.has_warned = True

    assert _press("\x03", before=warn) == (["stop editing", ("quit", 130)], "")


def test_ctrl_d_leaves_only_when_there_is_nothing_typed() -> None:
    assert _press("\x04")[0] == [("quit", 0)]
    assert _press("ab", "\x1b[D", "\x04") == ([], "a")


def test_ctrl_d_does_not_leave_in_the_middle_of_an_answer() -> None:
    heard, _ = _press("\x04", answering=True)

    assert [entry[0] for entry in heard] == ["notice"]


def test_the_arrows_edit_the_queue_while_there_is_one() -> None:
    def fill(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        listener.queue.add("first")
        listener.queue.add("second")

    assert _press("\x1b[A", answering=True, before=fill)[1] == "second"


@pytest.mark.parametrize("typed", ["new", "/new", "\x1b[200~new\x1b[201~"])
def test_what_is_typed_takes_the_place_of_a_message_that_came_back(typed: str) -> None:
    """The two were one message: "Write a poemnew"."""

    def put_back(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        view.put_back("Write a poem", gives_way=True)

    assert _press(*typed if len(typed) < 5 else [typed], before=put_back)[1].endswith("new")
    assert "poem" not in _press(typed, before=put_back)[1]
    assert _press(typed, "\x03", "\x1b[A", "\x1b[A", before=put_back)[1] == "Write a poem"
    assert _press("\x7f", "m", before=put_back) == ([], "Write a poem")
    assert _press("\r", before=put_back) == ([("accept", "Write a poem")], "")


def test_a_command_with_a_slip_is_mended_where_it_ends() -> None:
    def put_back(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        view.put_back("/mode")

    assert _press("l", before=put_back)[1] == "/model"
    assert _press("/help", before=put_back)[1] == "/help"


def test_an_emoji_of_several_parts_is_edited_as_it_was_typed() -> None:
    assert _press("a🧑\u200d🚀b", "\x1b[D", "X") == ([], "a🧑\u200d🚀Xb")


def test_up_is_history_when_nothing_waits() -> None:
    assert _press("old", "\r", "\x1b[A")[1] == "old"


def test_ctrl_r_searches_the_history() -> None:
    assert _press("needle in it", "\r", "other", "\r", "\x12", "needle", "\r")[1] == "needle in it"


def test_right_takes_the_suggestion() -> None:
    assert _press("hello world", "\r", "hel", "\x1b[C")[1] == "hello world"


def test_alt_arrows_go_to_other_answers() -> None:
    assert _press("\x1b[1;3D", "\x1b[1;3C")[0] == [("sibling", -1), ("sibling", 1)]


def test_f2_switches_the_statistics() -> None:
    assert _press("\x1bOQ")[0] == ["stats"]


def _picked(*keys: str) -> object:
    picked: list[object] = []

    def open_picker(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        async def choose() -> None:
            picked.append(await view.choose("Pick", [Choice(c) for c in ("red", "green", "blue")]))

        view._app.create_background_task(choose())

    heard, text = _press("", *keys, before=open_picker)
    assert (heard, text) == ([], ""), "a picker gets every key"
    return picked[0] if picked else "open"


@pytest.mark.parametrize(
    ("keys", "picked"),
    [
        (["\r"], 0),
        (["\x1b[B", "\x1b[B", "\r"], 2),
        (["\x1b[A", "\r"], 2),
        (["gre", "\r"], 1),
        (["grex", "\x7f", "\r"], 1),
        (["\x1b"], None),
        (["\x03"], None),
        (["xyz", "\r"], "open"),
    ],
)
def test_a_picker_is_worked_with_arrows_letters_enter_and_escape(keys, picked):
    assert _picked(*keys) == picked


def test_the_second_press_counts_only_within_its_time() -> None:
    now = [0.0]
    twice = DoublePress(2.0, clock=lambda: now[0])
    assert not twice.press()
    now[0] = 1.9
    assert twice.press()
    assert not twice.press(), "the third begins anew"
    now[0] = 5.0
    assert not twice.press()
    twice.forget()
    assert not twice.press()


def test_a_completion_is_taken_by_enter_and_not_sent() -> None:
    from kvchat.terminal.command_runner import build_registry
    from kvchat.terminal.completion import LineCompleter

    def use_completer(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        view.buffer.completer = LineCompleter(build_registry(), {})

    heard, text = _press("/expo", "\t", "\r", before=use_completer)
    assert (heard, text) == ([], "/export")


def test_another_tab_goes_on_in_the_directory_that_was_completed(tmp_path, monkeypatch):
    """In one that had to be put in quotation marks it chose the directory again and again."""
    from kvchat.terminal.command_runner import build_registry
    from kvchat.terminal.completion import LineCompleter

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my docs").mkdir()
    (tmp_path / "my docs" / "one two.md").write_text("x")

    def use_completer(view: LivePrompt, listener: _Listener, stdin: PipeInput) -> None:
        view.buffer.completer = LineCompleter(build_registry(), {})

    _, text = _press("see @my", "\t", "\t", before=use_completer)
    assert text == 'see @"my docs/one two.md" '
