"""Files of conversations, deleted and exported by commands."""

from pathlib import Path

import pytest

from kvchat.chat.controller import ChatController
from kvchat.core.errors import UsageError
from kvchat.terminal.script_commands import ScriptPage
from unit.terminal.test_controller_turns import ask, do


class NoChoicePage(ScriptPage):
    """A user who leaves every list with Esc."""

    async def choose(self, *asked: object, **settings: object) -> int | None:
        return None


def test_a_session_that_cannot_be_read_can_be_deleted(controller, store):
    """/delete offered it, and then refused: it read its title first."""
    ask(controller, "one")
    damaged = "20250101-000000-abcd"
    (store.directory / f"{damaged}.jsonl").write_text("no session\n")

    said = do(controller, f"/delete {damaged}")

    assert f"Delete “{damaged}” for good?" in said
    assert f"Deleted: {damaged}" in said
    assert store.ids() == [controller.require_session().session_id]


def test_leaving_the_list_of_what_to_delete_is_no_error(controller, store):
    """Esc said "There is nothing to delete.", of two conversations that were there."""
    for text in ("my cat", "my dog"):
        ask(controller, text)
        do(controller, "/new")

    assert do(controller, "/delete my", NoChoicePage) == "Nothing is deleted.\n"
    assert len(store.ids()) == 2


def test_a_second_export_finds_a_name_of_its_own(controller, tmp_path, monkeypatch):
    """After more turns, /export refused: the file exists already, choose another name."""
    monkeypatch.chdir(tmp_path)
    ask(controller, "one")
    first = do(controller, "/export")
    ask(controller, "two")
    second = do(controller, "/export")

    assert "-2.md" in second
    assert "-2.md" not in first
    assert sorted("two" in path.read_text() for path in tmp_path.glob("*.md")) == [False, True]


@pytest.mark.parametrize(("problem", "is_said"), [(None, True), ("The disk is full.", False)])
def test_an_export_says_that_the_conversation_is_saved_too_where_it_is(
    controller: ChatController,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    problem: str | None,
    is_said: bool,
) -> None:
    """It was said of one that a full disk had no room for, which was exported for that reason."""
    ask(controller, "one")
    monkeypatch.setattr(controller, "saving_problem", lambda: problem)

    assert ("also saved" in do(controller, f"/export {tmp_path}/one.md")) is is_said


def test_an_export_says_which_directory_is_missing(controller, tmp_path):
    """The help's own example failed with "No such file or directory" and the name of the file."""
    ask(controller, "one")
    with pytest.raises(UsageError, match=f"There is no directory {tmp_path}/notes"):
        do(controller, f"/export json {tmp_path}/notes/chat.json")
