"""ChatTemplate: the token ids to append to a conversation for the next user turn.

The template is a Jinja chat template as transformers defines it. History is never rendered again:
the first turn is rendered whole. For a later turn a placeholder conversation is rendered, and the
text after the placeholder answer is used.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from kvchat.chat.template_process import RenderingFailed, TemplateProcess
from kvchat.chat.template_tools import (
    NO_SPACES,
    PART_ROLES,
    Spaces,
    StandIns,
    ToolForm,
    cut_answer,
    find_spaces,
    find_tool_form,
    probe_message,
    with_parts,
    writes_parts,
)
from kvchat.chat.text_codec import Segment
from kvchat.chat.thinking import THINKING_MARKS, Think, ThinkSwitch
from kvchat.chat.tools import NO_TOOL_USE, ToolCall, ToolSet, ToolUse
from kvchat.core.errors import ModelError
from kvchat.model.files.text_settings import TextFiles

if TYPE_CHECKING:
    from kvchat.chat.tokenizer import ChatTokenizer

# Placeholders: letters and digits only, so that no template splits or changes them.
_USER = "Kv7User3Stands9Here"
_ANSWER = "Kv7Answer3Stands9Here"
_EARLIER = "Kv7Earlier3Stands9Here"
_LATER = "Kv7Later3Stands9Here"
_NEXT_ANSWER = "Kv7Next3Stands9Here"


# Words in a message that some templates look for, to switch thinking as `enable_thinking` does.
_WORD_FOR_TEMPLATE = re.compile(r"/(?:no_)?think\b")


class Strategy(StrEnum):
    """How a template renders history, as `_certify` found it. kvchat always appends."""

    APPEND_SAFE = "append-safe"
    REWRITES_LAST_ANSWER = "rewrites the last answer"
    REWRITES_HISTORY = "rewrites history"
    NO_TEMPLATE = "no template"
    MESSAGES = "the server's own"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a template writes around an answer that stands in the history.

    lead           what it adds to the prompt before the answer, such as the header of a channel
    is_told_apart  whether it writes less or other text before such an answer than in a prompt,
                   which may open a mark of thinking
    opener         the mark of thinking that its prompt opens, with the white space after it
    closing        the text after the answer, up to and with its closing token
    closing_id     that token; None if no control token closes an answer
    spaces         the white space that it strips from such an answer
    """

    lead: str = ""
    is_told_apart: bool = False
    opener: str = ""
    closing: str = ""
    closing_id: int | None = None
    spaces: Spaces = NO_SPACES


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A turn of the user that is to be written.

    clock         the time that the template may show
    system        the conversation's system prompt, whose ids stand before a later turn already
    is_answered   whether it is written as it stands in the history before a given answer, and not
                  as a prompt. Both are the same unless the format's `answer.is_told_apart`
    tools         those that are defined before a first turn
    use           the calls of the answer before a later turn, and their results, which stand before
                  the text
    """

    text: str
    clock: datetime
    system: str | None = None
    think: Think = Think.AUTO
    is_answered: bool = False
    tools: ToolSet | None = None
    use: ToolUse = NO_TOOL_USE


class TurnFormat(Protocol):
    """Turns user messages into the token ids to append. Implementations: a template, plain text,
    messages for a server.
    """

    strategy: Strategy
    switch: ThinkSwitch
    answer: AnswerForm

    def opening(self, turn: NewTurn) -> list[int]:
        """Return the ids of a context that starts with this user turn, after the tools if any."""

    def following(self, turn: NewTurn, last_id: int | None) -> list[int]:
        """Return the ids to append after an answer that ended with `last_id`."""

    def given_calls(self, text: str, calls: Sequence[ToolCall]) -> list[Segment]:
        """Return an answer with calls, after its prompt, with the closing token if that is kept."""

    @property
    def tools(self) -> ToolForm | None:
        """How the template writes tools and calls, None if it does not."""


class ChatTemplate:
    """A checkpoint's own template. `variables` are passed to it, such as `enable_thinking`.

    `process` renders it. Every method that renders raises ModelError if the template fails, and
    TimedOut if it exceeds the user's time limit.
    """

    def __init__(
        self,
        files: TextFiles,
        tokenizer: "ChatTokenizer",
        process: TemplateProcess,
        variables: dict[str, object] | None = None,
    ) -> None:
        self.switch = ThinkSwitch.of(files.chat_template or "", process.compile())
        self._process = process
        self._tokenizer = tokenizer
        self._variables = {**files.special_tokens, **(variables or {})}
        self._probe_clock = datetime(2026, 1, 2, 3, 4, 5)
        self._part_roles = self._find_part_roles()
        self.takes_system = self._find_system()
        self._spaces = {role: self._find_spaces(role) for role in ("system", "user", "assistant")}
        self.strategy = self._certify()
        self.answer = self._answer_form()

    def opening(self, turn: NewTurn) -> list[int]:
        """Return the ids of a context that starts with this user turn.

        If the template does not accept a system prompt, the prompt is put before the user's text.
        """
        return self._tokenizer.encode(self._opening(turn))

    def following(self, turn: NewTurn, last_id: int | None) -> list[int]:
        """Return the ids to append after an answer that ended with `last_id`.

        They close the answer, unless `last_id` is the closing token already, add the user turn, and
        open the next answer.
        """
        if turn.use.calls:
            segments = self._following_calls(turn)
            form = self._require_tools()
            closing_id = self._tokenizer.token_id(form.closing) if form.closing else None
        else:
            segments = self._following(turn)
            closing_id = self.answer.closing_id
        if closing_id is None or last_id != closing_id:
            return self._tokenizer.encode_after(last_id, segments)
        ids = self._tokenizer.encode(segments)
        return ids[ids.index(closing_id) + 1 :] if closing_id in ids else ids

    def _opening(self, turn: NewTurn) -> list[Segment]:
        system, user = turn.system, turn.text
        if system is not None and not self.takes_system:
            system, user = None, f"{system}\n\n{user}"
        content, texts = self._stand_in(_USER, user)
        messages = [_message("user", content)]
        if system is not None:
            content, more = self._stand_in(_EARLIER, system, "system")
            messages.insert(0, _message("system", content))
            texts |= more
        stand_ins = StandIns(self._tokenizer.reserved_texts)
        defined = stand_ins.guarded(turn.tools.definitions) if turn.tools else None
        rendered = self._rendered(turn, messages, defined)
        return _fill(rendered, texts | stand_ins.texts)

    def _following(self, turn: NewTurn) -> list[Segment]:
        content, texts = self._stand_in(_USER, turn.text)
        return _fill(self._after_answer(turn, content), texts)

    def _after_answer(self, turn: NewTurn, content: str = _USER) -> str:
        """Return what the template writes after an answer, up to the start of the next one.

        `content` stands for the turn's text.
        """
        messages = [
            *self._words(turn.system),
            _message("user", _EARLIER),
            _message("assistant", _ANSWER),
            _message("user", content),
        ]
        return self._rendered(turn, messages).rpartition(_ANSWER)[2]

    def _rendered(
        self,
        turn: NewTurn,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[dict[str, object]] | None = None,
    ) -> str:
        """Render messages that end with a turn, up to the answer to it."""
        if turn.is_answered:
            later = (_message("assistant", _NEXT_ANSWER), _message("user", _LATER))
            messages = [*messages, *later]
        return self._render(messages, turn.clock, turn.think, tools).partition(_NEXT_ANSWER)[0]

    def _stand_in(self, name: str, text: str, role: str = "user") -> tuple[str, dict[str, str]]:
        """Return what the template sees of a message, and the texts that replace its placeholders.

        It sees a placeholder for the text, but words for the template, and white space beside them.
        The texts are stripped as the template strips messages of the role.
        """
        pieces = re.split(f"({_WORD_FOR_TEMPLATE.pattern})", text)
        if len(pieces) == 1:
            return name, {name: self._spaces[role].strip(text)}
        content, texts = "", {}
        for number, piece in enumerate(pieces):
            core = piece.strip() if number % 2 == 0 else ""
            if not core:
                content += piece
                continue
            before, _, after = piece.partition(core)
            stand_in = f"{name}x{number}x"
            content += before + stand_in + after
            texts[stand_in] = core
        return content, texts

    def _words(self, system: str | None) -> list[dict[str, str]]:
        """Return a message with the words for the template in a system prompt: they hold on."""
        words = _WORD_FOR_TEMPLATE.findall(system or "")
        return [_message("system", " ".join(words))] if words and self.takes_system else []

    # Tools

    @cached_property
    def tools(self) -> ToolForm | None:
        return find_tool_form(self._render_probe, self._tokenizer, self._leads)

    def _render_probe(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[dict[str, object]] | None = None,
        is_open: bool = True,
    ) -> str:
        return self._render(messages, self._probe_clock, tools=tools, is_open=is_open)

    @cached_property
    def _leads(self) -> list[str]:
        """Return what may stand before an answer to the probe's message: as asked, and as told."""
        asked = self._render_probe([probe_message()])
        later = (_message("assistant", _NEXT_ANSWER), _message("user", _LATER))
        told = self._render_probe((probe_message(), *later)).partition(_NEXT_ANSWER)[0]
        return [asked, told]

    def _require_tools(self) -> ToolForm:
        assert self.tools is not None, "the template takes no tools"
        return self.tools

    def given_calls(self, text: str, calls: Sequence[ToolCall]) -> list[Segment]:
        form, stand_ins = self._require_tools(), StandIns(self._tokenizer.reserved_texts)
        said = {_NEXT_ANSWER: self._spaces["assistant"].strip(text)} if text else {}
        message = form.answer(_NEXT_ANSWER if text else "", calls, stand_ins)
        try:
            rendered = self._render_probe([probe_message(), message], is_open=False)
        except ModelError:  # some templates refuse text beside calls, others two calls at once
            if text:
                return self.given_calls("", calls)
            if len(calls) == 1:
                raise
            *first, last = (self.given_calls("", [call]) for call in calls)
            return [*(part for some in first for part in (*some[:-1], Segment("; "))), *last]
        answer, closing = cut_answer(rendered, self._leads, self._tokenizer)
        is_kept = bool(closing) and self._tokenizer.token_id(closing) == self.answer.closing_id
        return [*_fill(answer, said | stand_ins.texts), Segment(closing if is_kept else "")]

    def _following_calls(self, turn: NewTurn) -> list[Segment]:
        form, stand_ins = self._require_tools(), StandIns(self._tokenizer.reserved_texts)
        content, texts = self._stand_in(_USER, turn.text)
        later = [
            *form.results(turn.use.results, stand_ins),
            *([_message("user", content)] if turn.text or not turn.use.results else []),
        ]

        def rendered(calls: Sequence[ToolCall]) -> str:
            called = form.asked_calls(calls, stand_ins)
            earlier = [*self._words(turn.system), _message("user", _EARLIER)]
            return self._rendered(turn, [*earlier, called, *later])

        try:
            whole = rendered(turn.use.calls)
        except ModelError:  # some templates refuse two calls at once
            whole = rendered(turn.use.calls[-1:])
        rest = form.after(whole, self._tokenizer)
        return _fill(rest, texts | stand_ins.texts)

    # Answers

    def _answer_form(self) -> AnswerForm:
        """Compare a prompt with the same turn in the history, and read what closes an answer."""
        asked, told = (
            _text(self._opening(NewTurn(_USER, self._probe_clock, is_answered=is_answered)))
            for is_answered in (False, True)
        )
        closing, closing_id = self._closing(self._after_answer(NewTurn(_USER, self._probe_clock)))
        form = AnswerForm("", False, "", closing, closing_id, self._spaces["assistant"])
        if told.startswith(asked):
            return replace(form, lead=told[len(asked) :])
        mark = next((mark for mark in THINKING_MARKS if asked.rstrip().endswith(mark)), None)
        if mark is None:  # the template shortens its own text in the history
            return form
        return replace(form, is_told_apart=True, opener=asked[asked.rindex(mark) :])

    def _closing(self, after: str) -> tuple[str, int | None]:
        """Return the text up to the control token that closes an answer, and the token."""
        for token_id, begin, end in self._tokenizer.written(after):
            if after[:begin].strip() or not self._tokenizer.is_control(token_id):
                break
            return after[:end], token_id
        return "", None

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        clock: datetime,
        think: Think = Think.AUTO,
        tools: Sequence[dict[str, object]] | None = None,
        is_open: bool = True,
    ) -> str:
        variables = {**self._variables, **self.switch.variables(think)}
        formed = with_parts(messages, self._part_roles) if self._part_roles else messages
        try:
            return self._process.render(formed, variables, clock, tools, is_open)
        except RenderingFailed as error:
            raise ModelError(
                f"The checkpoint's chat template cannot be used: {error}.",
                "Use a checkpoint with a working template.",
            ) from error

    def _renders(self, messages: Sequence[dict[str, str]]) -> bool:
        try:
            rendered = self._render(messages, self._probe_clock)
        except ModelError:
            return False
        is_whole = all(message["content"] in rendered for message in messages)
        return is_whole and not writes_parts(rendered)

    # The certificate

    def _find_part_roles(self) -> frozenset[str]:
        """Return the roles whose content the template wants as a list of parts.

        Raises ModelError if the template loses a message of two turns both ways.
        """
        turns = [
            _message(*t) for t in (("user", _EARLIER), ("assistant", _ANSWER), ("user", _USER))
        ]
        failure: ModelError | None = None
        for roles in PART_ROLES:
            self._part_roles = roles
            try:
                rendered = self._render(turns, self._probe_clock)
            except ModelError as error:
                failure = failure or error
                continue
            before, _, after = rendered.partition(_ANSWER)
            is_whole = _EARLIER in before and _USER in after and _EARLIER not in after
            if is_whole and not writes_parts(rendered):
                return roles
        raise failure or ModelError(
            "The checkpoint's chat template cannot be used: it leaves out or changes messages.",
            "Use a checkpoint with a working template.",
        )

    def _find_system(self) -> bool:
        """Return whether the template takes a system prompt, as a text or as a list of parts."""
        messages, roles = [_message("system", _EARLIER), _message("user", _USER)], self._part_roles
        for tried in (roles, roles ^ {"system"}):
            self._part_roles = tried
            if self._renders(messages):
                return True
        self._part_roles = roles
        return False

    def _find_spaces(self, role: str) -> Spaces:
        """Find the white space that the template strips from the messages of a role."""

        def render(text: str) -> str:
            messages = [_message(role, text)]
            if role == "assistant":
                messages.insert(0, _message("user", _EARLIER))
            if role != "user":
                messages.append(_message("user", _LATER))
            return self._render(messages, self._probe_clock)

        try:
            return find_spaces(render, _ANSWER)
        except ModelError:  # such as a template without system prompts
            return NO_SPACES

    def _certify(self) -> Strategy:
        """Compare appending with rendering the whole conversation, on a few short conversations.

        An answer that the template refuses to render again counts as rewritten history.
        """
        answers = ("Fine, thanks.", "<think>\nhm\n</think>\n\nFine.", "Fine. ")
        found = [self._certify_with(answer) for answer in answers]
        order = (Strategy.APPEND_SAFE, Strategy.REWRITES_LAST_ANSWER, Strategy.REWRITES_HISTORY)
        return max(found, key=order.index)

    def _certify_with(self, answer: str) -> Strategy:
        system = "Be brief." if self.takes_system else None
        clock = self._probe_clock
        opening = _text(self._opening(NewTurn("Hello there", clock, system)))
        appended = opening + answer + _text(self._following(NewTurn("And you?", clock)))
        messages = [
            _message("user", "Hello there"),
            _message("assistant", answer),
            _message("user", "And you?"),
        ]
        if system is not None:
            messages.insert(0, _message("system", system))
        try:
            whole = self._render(messages, clock)
        except ModelError:
            return Strategy.REWRITES_HISTORY
        if whole == appended:
            return Strategy.APPEND_SAFE
        keeps_opening = whole.startswith(opening)
        return Strategy.REWRITES_LAST_ANSWER if keeps_opening else Strategy.REWRITES_HISTORY


class PlainText:
    """The format of a checkpoint without a template: the texts are concatenated."""

    strategy = Strategy.NO_TEMPLATE
    switch = ThinkSwitch()
    answer = AnswerForm()
    tools: ToolForm | None = None

    def __init__(self, tokenizer: "ChatTokenizer") -> None:
        self._tokenizer = tokenizer

    def given_calls(self, text: str, calls: Sequence[ToolCall]) -> list[Segment]:
        raise AssertionError("plain text has no form for calls")

    def opening(self, turn: NewTurn) -> list[int]:
        """Return the ids of the text, with the system prompt before it."""
        text = turn.text if turn.system is None else f"{turn.system}\n\n{turn.text}"
        return self._tokenizer.encode_bare(text, is_first=True)

    def following(self, turn: NewTurn, last_id: int | None) -> list[int]:
        """Return the ids of the text alone."""
        return self._tokenizer.encode_bare(turn.text, is_first=False)


def turn_format(
    files: TextFiles,
    tokenizer: "ChatTokenizer",
    variables: dict[str, object] | None = None,
    process: TemplateProcess | None = None,
) -> TurnFormat:
    """Return the format of a checkpoint: its template, or plain text if it has none.

    `process` is a process that was already started with the template; None starts one.
    """
    if files.chat_template is None:
        return PlainText(tokenizer)
    return ChatTemplate(
        files, tokenizer, process or TemplateProcess(files.chat_template), variables
    )


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def _fill(rendered: str, texts: Mapping[str, str]) -> list[Segment]:
    """Replace placeholders in a rendered conversation by the texts, as inert segments."""
    segments = [Segment(rendered)]
    for stand_in, text in texts.items():
        inert = Segment(text, is_inert=True)
        segments = [part for segment in segments for part in _replace(segment, stand_in, inert)]
    return segments


def _replace(segment: Segment, stand_in: str, inert: Segment) -> list[Segment]:
    """Split a segment at every placeholder and insert the inert text there."""
    if segment.is_inert:
        return [segment]
    parts: list[Segment] = []
    for index, text in enumerate(segment.text.split(stand_in)):
        if index:
            parts.append(inert)
        if text:
            parts.append(Segment(text))
    return parts
