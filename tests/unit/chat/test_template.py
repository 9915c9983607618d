"""Turns appended by themselves are what the template would have written, or the certificate says.

The oracle renders whole conversations with Jinja directly.
"""

import sys
from collections.abc import Collection
from datetime import datetime

import jinja2
import pytest

from kvchat.chat.template import ChatTemplate, NewTurn, PlainText, Strategy, turn_format
from kvchat.chat.template_tools import Spaces, find_spaces
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import ModelError
from support import template_zoo as zoo
from support.tokenizer_zoo import END, START, ZOO, byte_level, text_files

CLOCK = datetime(2025, 3, 4, 5, 6)
LATER = datetime(2026, 9, 9)


def template_of(source: str, kind: str = "byte level") -> ChatTemplate:
    files = text_files(ZOO[kind](), source)
    made = turn_format(files, ChatTokenizer(files))
    assert isinstance(made, ChatTemplate)
    return made


def written(
    source: str,
    *messages: tuple[str, str],
    clock: datetime = CLOCK,
    part_roles: Collection[str] = (),
) -> str:
    """Render with plain Jinja, the way transformers does."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def content(role: str, text: str) -> object:
        return [{"type": "text", "text": text}] if role in part_roles else text

    return environment.from_string(source).render(
        messages=[{"role": role, "content": content(role, text)} for role, text in messages],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
        strftime_now=clock.strftime,
        raise_exception=refuse,
    )


def shown(ids: list[int]) -> str:
    return str(byte_level().decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("source", "strategy", "takes_system"),
    [
        (zoo.CHATML, Strategy.APPEND_SAFE, True),
        (zoo.DATED, Strategy.APPEND_SAFE, True),
        (zoo.THINK_STRIPPING, Strategy.REWRITES_LAST_ANSWER, True),
        (zoo.TRIMMING, Strategy.REWRITES_LAST_ANSWER, True),
        (zoo.SYSTEM_GLUED, Strategy.REWRITES_HISTORY, True),
        (zoo.NO_SYSTEM, Strategy.APPEND_SAFE, False),
        (zoo.NO_GENERATION_PROMPT, Strategy.REWRITES_LAST_ANSWER, True),
        (zoo.OPENS_THINKING, Strategy.REWRITES_HISTORY, True),
        (zoo.TEXT_ONLY, Strategy.APPEND_SAFE, True),
        (zoo.RAISES_ON_THINKING, Strategy.REWRITES_HISTORY, True),
    ],
    ids=[
        "chatml",
        "dated",
        "think-stripping",
        "trimming",
        "system glued",
        "no system",
        "no generation prompt",
        "opens thinking",
        "text only",
        "raises on thinking",
    ],
)
def test_the_certificate_names_each_habit(source, strategy, takes_system):
    template = template_of(source)

    assert template.strategy is strategy
    assert template.takes_system is takes_system


@pytest.mark.parametrize("source", [zoo.CHATML, zoo.DATED, zoo.NO_SYSTEM, zoo.TRIMMING])
def test_three_turns_appended_are_the_conversation_rendered_whole(source: str) -> None:
    template = template_of(source)
    end = template.answer.closing_id
    texts = ["Hello there", "a {{ brace }} & <b>\n\nblank", "héh 好 😀"]
    answers = ["Fine.", "Two\nlines"]

    ids = template.opening(NewTurn(texts[0], CLOCK))
    raw = byte_level()
    messages = [("user", texts[0])]
    for answer, text in zip(answers, texts[1:], strict=True):
        assert end is not None
        ids += [*raw.encode(answer, add_special_tokens=False).ids, end]
        ids += template.following(NewTurn(text, CLOCK), end)
        messages += [("assistant", answer), ("user", text)]

    whole = written(source, *messages)
    assert shown(ids) == whole
    assert ids == raw.encode(whole, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("source", "takes_system", "messages"),
    [
        (zoo.DATED, True, [("system", "Be brief."), ("user", "Hi")]),
        (zoo.NO_SYSTEM, False, [("user", "Be brief.\n\nHi")]),  # it raises
        (zoo.IGNORES_SYSTEM, False, [("user", "Be brief.\n\nHi")]),
    ],
)
def test_a_system_prompt_that_a_template_does_not_take_stands_before_the_message(
    source: str, takes_system: bool, messages: list[tuple[str, str]]
) -> None:
    """Whether it came through was asked of an `x`, which stood elsewhere in the text as well."""
    template = template_of(source)

    assert template.takes_system is takes_system
    assert shown(template.opening(NewTurn("Hi", CLOCK, "Be brief."))) == written(source, *messages)


def test_the_clock_is_the_conversations_own() -> None:
    template = template_of(zoo.DATED)

    assert "04 Mar 2025" in shown(template.opening(NewTurn("Hi", CLOCK)))
    assert "09 Sep 2026" in shown(template.opening(NewTurn("Hi", LATER)))
    assert template.following(NewTurn("x", CLOCK), None) == template.following(
        NewTurn("x", LATER), None
    )


ODD_SPACES = "\u3000\xa0hi\r\n\x0b\u2028\x1c"


@pytest.mark.parametrize("text", ["  two  ", "\n\tx\n ", " ", "", ODD_SPACES])
@pytest.mark.parametrize("source", [zoo.CHATML, zoo.TRIMMING])
def test_white_space_around_a_message_is_treated_as_the_template_treats_it(source, text):
    template = template_of(source)

    assert shown(template.opening(NewTurn(text, CLOCK))) == written(source, ("user", text))
    assert (
        shown(template.following(NewTurn(text, CLOCK), None))
        == (written(source, ("user", "q"), ("assistant", "X"), ("user", text)).partition("X")[2])
    )


@pytest.mark.parametrize("source", [zoo.TRIMMING, zoo.TRIMMING_SYSTEM, zoo.CHATML])
def test_every_white_space_is_stripped_by_role_as_jinja_strips_it(source: str) -> None:
    """Only spaces, tabs and newlines were stripped, from every role as from the user's."""
    talk = (("system", ODD_SPACES), ("user", ODD_SPACES))
    template = template_of(source)

    assert shown(template.opening(NewTurn(talk[1][1], CLOCK, talk[0][1]))) == written(source, *talk)
    answer = template.answer.spaces.strip(ODD_SPACES)
    assert f"\n{answer}<" in written(source, *talk, ("assistant", ODD_SPACES))


def test_no_white_space_is_unknown() -> None:
    every = "".join(filter(str.isspace, map(chr, range(sys.maxunicode + 1))))
    assert find_spaces(str.strip, "x") == Spaces(every, every)
    assert find_spaces(lambda text: text.lstrip("\n"), "x") == Spaces("\n", "")


@pytest.mark.parametrize(
    ("source", "part_roles"),
    [
        (zoo.PARTS, ("system", "user", "assistant")),
        (zoo.CHOSEN_PARTS, ("system", "user", "assistant")),
        (zoo.FIRST_PART, ("system", "user", "assistant")),
        (zoo.REFUSES_TEXT, ("system", "user", "assistant")),
        (zoo.PARTS_OF_USERS, ("user",)),
    ],
    ids=["loop", "selectattr", "first", "refuses text", "user's"],
)
def test_a_template_that_wants_lists_of_parts_gets_them(source, part_roles):
    """Such checkpoints were refused: their templates left out every text."""
    template, text = template_of(source), "Hi <|im_end|>"
    talk = (("system", "Be brief."), ("user", text), ("assistant", "X"), ("user", "More"))
    whole = written(source, *talk, part_roles=part_roles)

    assert template.strategy is Strategy.APPEND_SAFE
    opened = shown(template.opening(NewTurn(text, CLOCK, "Be brief.")))
    assert opened == whole.partition("X")[0]
    assert shown(template.following(NewTurn("More", CLOCK), None)) == whole.rpartition("X")[2]


def test_the_closing_token_is_dropped_where_the_answer_ended_with_it_and_only_there() -> None:
    template = template_of(zoo.CHATML)
    end = byte_level().token_to_id(END)
    assert template.answer.closing_id == end
    interrupted = byte_level().token_to_id("a")

    closed, cut = (template.following(NewTurn("x", CLOCK), last) for last in (end, interrupted))

    assert cut == [end, *closed]
    assert shown(closed) == f"\n{START}user\nx{END}\n{START}assistant\n"


def test_text_that_closes_an_answer_is_never_dropped() -> None:
    """An answer cut off at a line break once lost the line break the template writes after it."""
    template = template_of(zoo.TEXT_ONLY)
    newline = byte_level().encode("\n").ids[0]
    assert template.answer.closing_id is None

    assert shown(template.following(NewTurn("x", CLOCK), newline)) == "\nQ: x\nA: "


@pytest.mark.parametrize("kind", ZOO)
def test_messages_that_spell_control_tokens_or_stand_ins_are_only_text(kind: str) -> None:
    template = template_of(zoo.CHATML, kind)
    tokenizer = ChatTokenizer(text_files(ZOO[kind](), zoo.CHATML))
    for text in (END, "Kv7Answer3Stands9Here", "Kv7Earlier3Stands9Here Kv7User3Stands9Here"):
        for ids in (
            template.opening(NewTurn(text, CLOCK, text)),
            template.following(NewTurn(text, CLOCK), None),
        ):
            decoded = tokenizer.decode(ids).replace(" ", "")
            assert decoded.lower().count(text.replace(" ", "").lower()) in (1, 2)
            ends = [token for token in ids if token == tokenizer.token_id(END)]
            assert len(ends) == 2


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (zoo.RAISES_ALWAYS, "not for chatting"),
        (zoo.RAISES_ON_ANSWERS, "one turn only"),
        (zoo.SHOUTING, "leaves out or changes"),
        (zoo.DROPS_ANSWERS, "leaves out or changes"),
        (zoo.ONLY_THE_LAST, "leaves out or changes"),
        (zoo.WRITES_PARTS, "leaves out or changes"),
        ("Hello!", "leaves out or changes"),
        ("{% for %}", "is not valid"),
        ("{{ messages[7].content }}", "cannot be used"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_cannot_be_appended_to_is_refused_in_a_sentence(source, reason):
    """A template that raised on a second turn, or changed the stand-in it was to be cut at, was
    taken: the first ended kvchat with a traceback, the second lost what the user had typed."""
    with pytest.raises(ModelError, match=reason):
        template_of(source)


def test_what_transformers_gives_templates_is_there() -> None:
    source = (
        "{%- for m in messages -%}{% if m.role == 'nobody' %}{% continue %}{% endif %}"
        "{% generation %}{{ {'a': '<é>'} | tojson }}{{ m.content }}{% endgeneration %}"
        "{%- endfor -%}{{ enable_thinking is defined }}{{ tools is none }}"
    )
    files = text_files(byte_level(), source)
    template = turn_format(files, ChatTokenizer(files), {"enable_thinking": False})

    assert shown(template.opening(NewTurn("hi", CLOCK))) == '{"a": "<é>"}hiTrueTrue'


def test_without_a_template_texts_follow_one_another() -> None:
    files = text_files(byte_level(), None, adds_bos=True)
    plain = turn_format(files, ChatTokenizer(files))
    assert isinstance(plain, PlainText)
    assert plain.strategy is Strategy.NO_TEMPLATE
    assert plain.answer.closing_id is None

    assert shown(plain.opening(NewTurn("Once upon", CLOCK, "Rules."))) == "<s>Rules.\n\nOnce upon"
    assert shown(plain.following(NewTurn(f" a time{END}", CLOCK), 3)) == f" a time{END}"
    assert byte_level().token_to_id(END) not in plain.following(NewTurn(END, CLOCK), None)
