"""AnswerMemory: its limit of bytes holds between two looks; who may read it."""

from pathlib import Path

import pytest

from kvchat.chat.answer_memory import AnswerMemory, KnownAnswer
from kvchat.core.types import FinishReason


def test_long_answers_go_before_many_of_them_exceed_the_limit(tmp_path: Path) -> None:
    """The oldest were dropped at every 256th answer only: 256 long ones are any number of bytes."""
    limit, answer = 8_000, KnownAnswer(tuple(range(200)), FinishReason.STOP)
    memory = AnswerMemory(tmp_path / "answers.db", max_bytes=limit)
    keys = [bytes([number]) * 16 for number in range(100)]

    for key in keys:
        memory.put(key, answer)

    known = [key for key in keys if memory.find(key) is not None]
    assert 0 < len(known) * 4 * len(answer.token_ids) <= limit * 9 // 8 + 800
    assert memory.find(keys[-1]) == answer
    memory.close()


def test_the_files_of_answers_are_this_users_alone_whatever_they_were(tmp_path: Path) -> None:
    """A file that another umask had made kept its mode, and so did the log beside it."""
    path, answer = tmp_path / "kvchat" / "answers.db", KnownAnswer((1, 2), FinishReason.STOP)
    before = AnswerMemory(path)
    before.put(b"key", answer)  # its log stays: it is not closed
    files = [path, path.with_name("answers.db-wal"), path.with_name("answers.db-shm")]
    for file in files:
        file.chmod(0o666)

    after = AnswerMemory(path)

    assert after.find(b"key") == answer
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 3
    assert path.parent.stat().st_mode & 0o777 == 0o700
    before.close()
    after.close()


@pytest.mark.parametrize("name", ["answers.db", "answers.db-wal", "answers.db-shm"])
def test_no_link_is_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"")
    target.chmod(0o644)
    (tmp_path / name).symlink_to(target)

    memory = AnswerMemory(tmp_path / "answers.db")
    memory.put(b"key", KnownAnswer((1,), FinishReason.STOP))

    assert memory.find(b"key") is not None, "it is known until the program ends"
    memory.close()
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"", 0o644)
