"""What the demo model is taught about kvchat: complete, unambiguous, and short enough to say."""

import re

import pytest

from demo_recipe.dialogues.knowledge import TOPICS
from demo_recipe.scene import Turn
from demo_recipe.scores import judge
from kvchat.cli.flags import BENCH_FLAGS, OF_CHAT, SERVE_FLAGS
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands import Command

COMMANDS = build_registry().commands
NAMES = [f"/{name}" for command in COMMANDS for name in (command.name, *command.aliases)]
PARAMETERS = {p.name: p for p in (*OF_CHAT, *SERVE_FLAGS, *BENCH_FLAGS)}.values()
NAMED = {
    phrasing.text
    for topic in TOPICS
    if "names" in topic.asks
    for phrasing in topic.asks["names"].all()
}


WAYS = [
    *((name,) for name in NAMES),
    *((parameter.flag, f"--no-{parameter.dashed}") for parameter in PARAMETERS),
    *((parameter.short,) for parameter in PARAMETERS if parameter.short),
]


@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: ways[0])
def test_every_command_and_flag_can_be_asked_for_by_name(ways: tuple[str, ...]) -> None:
    assert set(ways) & NAMED


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_is_in_some_answer(command: Command) -> None:
    assert any(f"/{command.name}" in f"{topic.answer} {topic.more}" for topic in TOPICS)


def test_no_answer_names_a_command_that_does_not_exist() -> None:
    """The pair once said that there is no /compact: the answers were older than the commands."""
    said = " ".join(f"{topic.answer} {topic.more} {topic.brief}" for topic in TOPICS)

    assert set(re.findall(r"(?<![\w.*])/[a-z]+\b(?!/)", said)) <= set(NAMES)


def test_what_does_not_exist_is_not_asked_for_by_the_name_of_what_does() -> None:
    missing = next(topic for topic in TOPICS if "no such command" in topic.answer)
    asked = {phrasing.text for phrasing in missing.asks["names"].all()}

    assert not asked & set(NAMES)


def test_no_phrasing_belongs_to_two_topics() -> None:
    owners: dict[str, str] = {}
    for topic in TOPICS:
        for phrases in topic.asks.values():
            for phrasing in phrases.all():
                owner = owners.setdefault(phrasing.text.lower(), topic.answer)
                assert owner == topic.answer, phrasing.text


def test_every_answer_has_its_required_words_and_none_of_the_others_marks_it_wrong() -> None:
    for topic in TOPICS:
        turn = Turn("", topic.answer, "kvchat", topic.must, topic.never)
        assert judge(topic.answer, turn).is_good, topic.answer


def test_no_two_topics_share_an_answer_and_all_can_be_continued_and_shortened() -> None:
    assert len({topic.answer for topic in TOPICS}) == len(TOPICS)
    for topic in TOPICS:
        assert topic.more
        assert len(topic.brief) < len(topic.answer)


def test_the_way_to_a_real_model_is_said_in_full() -> None:
    assert any("kvchat --model <hub id or directory>" in topic.answer for topic in TOPICS)
