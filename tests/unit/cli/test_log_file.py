"""The log file: private, bounded, shared by processes, and without a word of any conversation."""

import io
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvchat.cli.log_file import LOG_NAME, LogFile, close_log, open_log
from kvchat.core.errors import ExitCode

SECRET = "my-secret-word"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    open_log(tmp_path / "state", is_debug=False)
    yield tmp_path / "state" / LOG_NAME
    close_log()


def test_a_warning_makes_the_file_which_only_its_owner_can_read(log: Path) -> None:
    assert not log.exists()

    logging.getLogger("kvchat.cache").warning("a pack is damaged key=%s", "ab12")

    assert "WARNING kvchat.cache: a pack is damaged key=ab12" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


def test_messages_of_errors_that_may_hold_text_are_left_out(log: Path) -> None:
    logger = logging.getLogger("kvchat.chat")
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ValueError(f"cannot render {SECRET}") from error
    except ValueError as error:
        logger.exception("a template failed")
        logger.error("a template failed: %s", error)

    text = log.read_text()
    assert SECRET not in text
    assert "ValueError" in text
    assert "KeyError" in text
    assert Path(__file__).name in text


def test_messages_of_the_system_are_kept(log: Path) -> None:
    logging.getLogger("kvchat.cache").warning("not kept: %s", OSError(28, "No space left"))

    assert "No space left" in log.read_text()


def test_another_handler_that_formats_first_does_not_leak_the_message(log: Path) -> None:
    """`logging` keeps the formatted exception in the record, for the handlers that come later."""
    logger = logging.getLogger("kvchat.order")
    first = logging.StreamHandler(io.StringIO())
    logger.addHandler(first)
    try:
        logger.error("failed", exc_info=ValueError(SECRET))
    finally:
        logger.removeHandler(first)

    assert SECRET not in log.read_text()


def test_old_lines_go_when_the_file_is_full(tmp_path: Path) -> None:
    handler = LogFile(tmp_path / LOG_NAME)
    record = logging.makeLogRecord({"msg": "x" * 10_000, "levelno": logging.WARNING})

    for _ in range(500):
        handler.emit(record)
    handler.close()

    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [LOG_NAME, f"{LOG_NAME}.1", f"{LOG_NAME}.2"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 << 20


def test_a_process_follows_when_another_has_begun_a_new_file(tmp_path: Path) -> None:
    handler = LogFile(tmp_path / LOG_NAME)
    handler.emit(logging.makeLogRecord({"msg": "before"}))
    (tmp_path / LOG_NAME).rename(tmp_path / f"{LOG_NAME}.1")

    handler.emit(logging.makeLogRecord({"msg": "after"}))
    handler.close()

    assert "after" in (tmp_path / LOG_NAME).read_text()
    assert "after" not in (tmp_path / f"{LOG_NAME}.1").read_text()


def test_a_link_in_its_place_is_not_followed(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.parent.mkdir(parents=True)
    other = log.parent / "other.txt"
    other.write_text("mine")
    log.symlink_to(other)

    logging.getLogger("kvchat.cache").warning("something degraded")

    assert other.read_text() == "mine"
    assert capfd.readouterr().err == ""


def test_nothing_is_logged_after_the_log_is_closed(log: Path) -> None:
    """An incognito chat leaves no trace, and prints no warnings in its stead."""
    close_log()

    logging.getLogger("kvchat.cache").warning("something degraded")

    assert not log.exists()


def test_debug_logs_more_and_to_stderr_too(tmp_path, capsys):
    open_log(tmp_path, is_debug=True)
    try:
        logging.getLogger("kvchat.model").debug("a detail")
    finally:
        close_log()

    assert "a detail" in (tmp_path / LOG_NAME).read_text()
    assert "a detail" in capsys.readouterr().err


def test_an_unexpected_error_leaves_its_traceback_in_the_log(tmp_path, monkeypatch, capsys):
    from kvchat.cli import app, main

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(app, "app", fail)
    code = main._run()
    close_log()

    text = (tmp_path / "kvchat" / LOG_NAME).read_text()
    assert code == ExitCode.GENERATION
    assert "ZeroDivisionError" in text
    assert SECRET not in text
    assert "This is a bug" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_is_known_before_and_after_a_commands_name(arguments, tmp_path, monkeypatch, capsys):
    """Every command may fail and name `--debug`; `kvchat bench --debug` was once unknown."""
    from kvchat.cli import app, main

    def fail(given: list[str], **_: object) -> None:
        assert given == ["doctor"]
        raise ZeroDivisionError

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(app, "app", fail)
    monkeypatch.setattr(main.sys, "argv", ["kvchat", *arguments])
    main._run()
    close_log()

    assert "Traceback" in capsys.readouterr().err


def test_debug_behind_two_dashes_is_text() -> None:
    from kvchat.cli.main import _without_debug

    assert _without_debug(["--debug", "--", "--debug"]) == ["--", "--debug"]
