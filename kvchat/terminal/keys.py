"""The key bindings, idle and during an answer. They call the view's listener.

Esc acts at once unless more keys arrive in the same read, so that Alt-Enter does not act as Esc.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prompt_toolkit.application.current import get_app
from prompt_toolkit.filters import Condition, has_completions, is_searching, shift_selection_mode
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent, merge_key_bindings
from prompt_toolkit.key_binding.bindings.auto_suggest import load_auto_suggest_bindings
from prompt_toolkit.key_binding.key_bindings import KeyBindingsBase
from prompt_toolkit.keys import Keys

from kvchat.core.errors import ExitCode
from kvchat.terminal.multiline import continues, is_block_open, with_line_feeds, without_block_marks
from kvchat.terminal.pickers import PAGE_ROWS, Picker

if TYPE_CHECKING:
    from kvchat.terminal.prompt import LivePrompt

E = KeyPressEvent

_TWICE_S = 2.0
_ESCAPE_TWICE_S = 0.8


class DoublePress:
    """Detects the second of two presses within a time."""

    def __init__(self, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._within_s = within_s
        self._clock = clock
        self._last_s = float("-inf")

    def press(self) -> bool:
        """Count a press; true for the second of two. A third press counts as a first."""
        now_s = self._clock()
        is_second = now_s - self._last_s <= self._within_s
        self._last_s = float("-inf") if is_second else now_s
        return is_second

    def forget(self) -> None:
        self._last_s = float("-inf")


def build_keys(prompt: "LivePrompt") -> KeyBindingsBase:
    """Return all bindings in addition to prompt_toolkit's own editing keys."""
    bindings = KeyBindings()
    _bind_lines(bindings, prompt)
    _bind_stopping(bindings, prompt)
    _bind_moving(bindings, prompt)
    return merge_key_bindings([load_auto_suggest_bindings(), bindings, _picker_keys(prompt)])


def _bind_lines(bindings: KeyBindings, prompt: "LivePrompt") -> None:
    """Enter and the ways to a new line."""
    is_typing = ~is_searching

    @bindings.add("enter", filter=is_typing)
    def _enter(event: E) -> None:
        buffer = prompt.buffer
        state = buffer.complete_state
        if state is not None and state.current_completion is not None:
            buffer.complete_state = None  # accept the menu's choice, but do not send yet
            return
        before = buffer.document.text_before_cursor
        if continues(before):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_block_open(buffer.text):
            buffer.insert_text("\n")
        else:
            submit(prompt)

    @bindings.add("escape", "enter", filter=is_typing)
    @bindings.add("c-j", filter=is_typing)
    def _newline(event: E) -> None:
        prompt.buffer.insert_text("\n")

    @bindings.add("/", filter=Condition(lambda: prompt.gives_way_to_command))
    def _begin_anew(event: E) -> None:
        # "/hepl" and "/help", both typed ahead, were one message, "/hepl/help".
        prompt.begin_anew()
        prompt.buffer.insert_text("/")

    gives_way = Condition(lambda: prompt.gives_way_to_text) & is_typing

    @bindings.add(Keys.Any, filter=gives_way)
    @bindings.add(Keys.BracketedPaste, filter=gives_way)
    def _type_anew(event: E) -> None:
        prompt.begin_anew()
        prompt.buffer.insert_text(with_line_feeds(event.data))

    @bindings.add("backspace", filter=shift_selection_mode)
    @bindings.add("c-h", filter=shift_selection_mode)
    def _amend(event: E) -> None:
        prompt.buffer.exit_selection()
        prompt.buffer.delete_before_cursor()

    @bindings.add(Keys.BracketedPaste, filter=shift_selection_mode)
    def _paste_instead(event: E) -> None:
        prompt.buffer.cut_selection()
        prompt.buffer.insert_text(with_line_feeds(event.data))

    @bindings.add("tab", filter=is_typing)
    def _complete(event: E) -> None:
        state = prompt.buffer.complete_state
        is_taken = state is not None and state.complete_index is not None
        if state is not None and not (is_taken and len(state.completions) == 1):
            prompt.buffer.complete_next()
        else:
            prompt.buffer.complete_state = None  # the only choice is taken: what follows it?
            prompt.buffer.start_completion(insert_common_part=True)

    @bindings.add("c-g", filter=is_typing)
    def _edit(event: E) -> None:
        prompt.edit_prompt()


def submit(prompt: "LivePrompt") -> None:
    """Send the prompt's text and add it to the history."""
    text = prompt.buffer.text
    if text.strip():
        prompt.buffer.append_to_history()
    prompt.buffer.reset()
    prompt.listener.accept(without_block_marks(text))


def _bind_stopping(bindings: KeyBindings, prompt: "LivePrompt") -> None:
    """Esc, Ctrl-C, Ctrl-D, Ctrl-Z."""
    leaving, clearing = DoublePress(_TWICE_S), DoublePress(_ESCAPE_TWICE_S)
    # Keys of the same read belong together: Esc with another key means Alt and that key.
    stands_alone = Condition(lambda: not get_app().key_processor.input_queue)

    @bindings.add("escape", filter=stands_alone & ~is_searching, eager=True)
    def _escape(event: E) -> None:
        if prompt.buffer.complete_state is not None:
            prompt.buffer.cancel_completion()
        elif prompt.listener.is_answering:
            prompt.listener.stop()
        elif clearing.press():
            _clear_or_rewind(prompt)

    @bindings.add("c-c", filter=~is_searching)
    @bindings.add("<sigint>")
    def _interrupt(event: E) -> None:
        if prompt.is_lent:
            if prompt.interrupts_leave:
                prompt.listener.leave(ExitCode.INTERRUPT)
            return  # else another program has the terminal, and handles the key
        if prompt.listener.is_answering:
            leaving.forget()
            prompt.listener.stop()
            return
        if prompt.buffer.text:
            leaving.forget()  # text was typed since the first press: this one clears it
        _clear(prompt)
        if leaving.press() or prompt.listener.has_warned:
            prompt.listener.leave(ExitCode.INTERRUPT)
        else:
            prompt.listener.notice("Ctrl-C again leaves.")

    @bindings.add("c-d", filter=Condition(lambda: not prompt.buffer.text))
    def _end(event: E) -> None:
        if prompt.listener.is_answering:
            prompt.listener.notice(f"Esc stops {prompt.listener.stoppable_name}, /exit leaves.")
        else:
            prompt.listener.leave(ExitCode.OK)

    @bindings.add("c-z")
    def _suspend(event: E) -> None:
        event.app.suspend_to_background()


def _clear(prompt: "LivePrompt") -> None:
    """Clear the prompt; its text goes to the history, so that Up restores it."""
    if prompt.buffer.text.strip():
        prompt.keep_cleared()
    prompt.buffer.reset()
    prompt.listener.stop_editing()


def _clear_or_rewind(prompt: "LivePrompt") -> None:
    if prompt.buffer.text:
        _clear(prompt)
    else:
        prompt.listener.rewind()


def _bind_moving(bindings: KeyBindings, prompt: "LivePrompt") -> None:
    """Arrows among waiting messages and answers, and F2."""
    is_first_line = Condition(lambda: prompt.buffer.document.on_first_line)
    is_last_line = Condition(lambda: prompt.buffer.document.on_last_line)
    edits_queue = Condition(lambda: _edits_queue(prompt)) & ~has_completions & ~is_searching

    @bindings.add("up", filter=edits_queue & is_first_line)
    def _previous(event: E) -> None:
        _edit_waiting(prompt, -1)

    @bindings.add("down", filter=edits_queue & is_last_line)
    def _next(event: E) -> None:
        _edit_waiting(prompt, +1)

    @bindings.add("escape", "left")
    def _previous_answer(event: E) -> None:
        prompt.listener.show_sibling(-1)

    @bindings.add("escape", "right")
    def _next_answer(event: E) -> None:
        prompt.listener.show_sibling(+1)

    @bindings.add("f2")
    def _stats(event: E) -> None:
        prompt.listener.toggle_stats()


def _edits_queue(prompt: "LivePrompt") -> bool:
    """Whether arrows move in the queue: it has messages, and the prompt is empty or edits one."""
    listener = prompt.listener
    is_editing = prompt.region.state.edited is not None
    return listener.has_queue and (is_editing or not prompt.buffer.text)


def _edit_waiting(prompt: "LivePrompt", step: int) -> None:
    text = prompt.listener.edit_queue(prompt.buffer.text, step)
    if text is not None:
        prompt.put_text(text)


def _picker_keys(prompt: "LivePrompt") -> KeyBindingsBase:
    """The bindings of an open picker, which receives every key before any other binding."""
    bindings = KeyBindings()
    is_picking = Condition(lambda: prompt.region.picker is not None)
    # Keys of the same read belong together: Esc with another key means Alt and that key.
    stands_alone = Condition(lambda: not get_app().key_processor.input_queue)

    def open_picker() -> Picker:
        assert prompt.region.picker is not None
        return prompt.region.picker

    def pick(picker: Picker) -> None:
        """Take the current choice, or what was asked about it."""
        if picker.is_asking:
            picker.end_asking(is_wanted=True)
        elif picker.result is not None:
            prompt.pick(picker.result)

    def leave(picker: Picker) -> None:
        """Take back what was asked, or leave the picker without a choice."""
        if picker.is_asking:
            picker.end_asking(is_wanted=False)
        else:
            prompt.pick(None)

    acts: dict[tuple[str, ...], Callable[[Picker], object]] = {
        ("up", "c-p"): lambda picker: picker.move(-1),
        ("down", "c-n", "tab"): lambda picker: picker.move(+1),
        ("pageup",): lambda picker: picker.move(-PAGE_ROWS, wraps=False),
        ("pagedown",): lambda picker: picker.move(+PAGE_ROWS, wraps=False),
        ("home",): lambda picker: picker.move_to_end(-1),
        ("end",): lambda picker: picker.move_to_end(+1),
        ("enter",): pick,
        ("c-c", "c-d", "<sigint>"): leave,
        ("c-r",): Picker.begin_renaming,
        ("c-x",): Picker.begin_deleting,
        ("c-o",): Picker.show_hidden,
        ("backspace",): Picker.erase,
        ("c-w",): Picker.erase_word,
        ("c-u",): Picker.erase_all,
    }

    def bind(key: str, act: Callable[[Picker], object]) -> None:
        bindings.add(key, filter=is_picking, eager=True)(lambda event: act(open_picker()))

    for keys, act in acts.items():
        for key in keys:
            bind(key, act)

    @bindings.add("escape", filter=is_picking & stands_alone, eager=True)
    def _escape(event: E) -> None:
        leave(open_picker())

    @bindings.add(Keys.Any, filter=is_picking, eager=True)
    @bindings.add(Keys.BracketedPaste, filter=is_picking, eager=True)
    def _type(event: E) -> None:
        # The data of any other special key is its escape sequence, which is no text.
        key = event.key_sequence[0].key
        if not isinstance(key, Keys) or key is Keys.BracketedPaste:
            open_picker().type("".join(char for char in event.data if char.isprintable()))

    return bindings
