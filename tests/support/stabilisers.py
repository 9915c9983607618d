"""A stabiliser whose records are in memory, or in a file that outlives it."""

from functools import cache
from pathlib import Path

from kvchat.chat.answer_memory import ResponseMemory
from kvchat.chat.stabiliser import Stabiliser
from kvchat.chat.tokenizer import ChatTokenizer
from support.tokenizer_zoo import byte_level, text_files


@cache
def codec() -> ChatTokenizer:
    return ChatTokenizer(text_files(byte_level()))


def new_stabiliser(is_for_all: bool = True, path: Path | None = None) -> Stabiliser:
    return Stabiliser(ResponseMemory(path, codec(), table="stabilised"), is_for_all)
