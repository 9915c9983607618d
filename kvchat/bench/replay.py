"""Scenario `replay`: runs recorded conversations again, turn by turn.

For every branch of every session file in a directory, prefills each user turn and times its first
token, then continues with the recorded answer. Needs a model with a tokenizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvchat.bench.engines import complete, new_engine
from kvchat.bench.measure import Sample
from kvchat.bench.report import Figure, Result, over
from kvchat.bench.setup import BenchSetup
from kvchat.chat.chat_model import read_chat_model, readopt
from kvchat.chat.conversation import Conversation, Role, Turn
from kvchat.chat.session_file import read_session
from kvchat.core.errors import KvchatError
from kvchat.engine.assembly import AssembledEngine


@dataclass(frozen=True, slots=True)
class _Replayed:
    """The cost of a conversation: new tokens, prefilled tokens, seconds to each first token."""

    num_new: int
    num_read: int
    first_token_s: Sample


def run(setup: BenchSetup) -> Result:
    """Replay all sessions of the directory, each with an empty cache."""
    settings = {"model": setup.source.name, "sessions": str(setup.sessions)}
    paths = sorted(setup.sessions.glob("*.jsonl")) if setup.sessions is not None else []
    if not paths:
        return Result("replay", settings, refusal="there are no sessions; give some by --sessions")
    try:
        model = read_chat_model(setup.source)
    except KvchatError as error:
        return Result("replay", settings, refusal=f"the model cannot chat: {error}")
    figures: list[Figure] = []
    assembled = new_engine(setup.source, setup.model, setup.cache)
    for path in paths:
        conversation = _read(path)
        readopt(conversation, model)
        if longest(conversation) + 1 < assembled.engine.max_context:
            assembled.engine.cache.clear()
            figures += _figures(path.stem, _replay(assembled, conversation), assembled)
    return Result("replay", settings, tuple(figures))


def _read(path: Path) -> Conversation:
    return read_session(path.read_bytes(), path.name).conversation


def longest(conversation: Conversation) -> int:
    """Return the number of tokens of the longest branch."""
    return max(len(conversation.context_ids(turn.turn_id)) for turn in conversation.leaves())


def _replay(assembled: AssembledEngine, conversation: Conversation) -> _Replayed:
    num_new, num_read, seconds = 0, 0, []
    for question, answer in exchanges(conversation):
        context = conversation.context_ids(question.turn_id)
        finished = complete(assembled.engine, context, 1).finished
        num_new += len(question.token_ids)
        num_read += finished.usage.prefilled_tokens
        seconds.append(finished.timing.ttft_s)
        if answer.token_ids:
            complete(assembled.engine, [*context, *answer.token_ids], 1)
    return _Replayed(num_new, num_read, Sample(tuple(seconds)))


def exchanges(conversation: Conversation) -> Iterator[tuple[Turn, Turn]]:
    """Yield every (question, answer) pair of turns, in recorded order."""
    for turn in conversation.turns():
        if turn.role is Role.ASSISTANT and turn.parent_id:
            yield conversation.turn(turn.parent_id), turn


def _figures(name: str, replayed: _Replayed, assembled: AssembledEngine) -> list[Figure]:
    turns = replayed.first_token_s
    return [
        over(
            f"{name}: prefilled in {len(turns.values)} turns",
            replayed.num_read,
            "tokens",
            ("new tokens", replayed.num_new),
            "prefilled over new",
            f"+{assembled.engine.cache.block_size} a turn",
        ),
        Figure(
            f"{name}: first token",
            turns.median * 1e3,
            "ms",
            max(turns.values) * 1e3,
            "the slowest turn",
            spread=turns.spread,
        ),
    ]
