"""AnswerMemory: its limit of bytes holds between two looks at all that it keeps."""

from pathlib import Path

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
