"""`kvchat bench turns --endpoint URL`: the cost of another turn where another program answers.

Counts the tokens that a 20-turn chat reads, as the server tells them, and compares the time to the
first token after a long history with that after a short one. Text is random words.
"""

import random
from dataclasses import dataclass

from kvchat.bench.measure import alternated
from kvchat.bench.report import Figure, Result, compared, over
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.events import AnswerEnded, AnswerFailed
from kvchat.chat.host import ChatHost
from kvchat.chat.session import ChatSession
from kvchat.core.types import MissReason, SamplingParams

_NUM_TURNS = 20
_WORDS, _ANSWER_TOKENS = 18, 40
_SHORT, _LONG = 512, 8192
_TOKENS_PER_WORD = 3


@dataclass(frozen=True, slots=True)
class EndpointSetup:
    """A host whose engine is a server. `is_quick` shrinks the work to a check that it runs."""

    host: ChatHost
    repeats: int
    is_quick: bool


def run_turns(setup: EndpointSetup) -> Result:
    """Measure tokens read and time to first token at a server."""
    ready = setup.host.wait_until_ready()
    settings = {"model": ready.name, "server": ready.device, "form": f"in {ready.sent_as}"}
    figures, notes = _reread(setup)
    figures += _first_tokens(setup, ready.context_limit)
    return Result("turns", settings, tuple(figures), notes=notes)


def _reread(setup: EndpointSetup) -> tuple[list[Figure], tuple[str, ...]]:
    session, words = setup.host.unsaved_session(), _Words(1)
    num_read = num_before = num_prompt = 0
    for _ in range(_NUM_TURNS):
        ended = _ask(session, words.text(_WORDS), _ANSWER_TOKENS)
        if ended.miss_reason is MissReason.NOT_TOLD:
            return [], ("The server does not tell how many tokens it had cached.",)
        num_read += ended.usage.prefilled_tokens
        num_prompt = ended.usage.prompt_tokens
        num_generated = num_before
        num_before += ended.usage.completion_tokens
    num_new = max(1, num_prompt - num_generated)
    name = f"prefilled in {_NUM_TURNS} turns"
    return [over(name, num_read, "tokens", ("new tokens", num_new), "prefilled over new")], ()


def _first_tokens(setup: EndpointSetup, limit: int) -> list[Figure]:
    longest = min(_LONG // 32 if setup.is_quick else _LONG, limit // 2)
    short, long = _Chat(setup.host, min(_SHORT, longest // 8)), _Chat(setup.host, longest)
    after_short, after_long = alternated(short.first_token_s, long.first_token_s, setup.repeats)
    name, beside = (
        f"first token, {long.num_tokens:,} of history",
        f"{short.num_tokens:,} of history",
    )
    return [compared(name, after_long, after_short, "ms", beside, "long over short", "1.6")]


class _Chat:
    """A conversation with a history of about so many tokens; each question goes below the same."""

    def __init__(self, host: ChatHost, num_tokens: int) -> None:
        self._session, self._words = host.unsaved_session(), _Words(num_tokens)
        ended = _ask(self._session, self._words.text(num_tokens // _TOKENS_PER_WORD), 1)
        self.num_tokens = ended.usage.prompt_tokens
        self._tip = self._session.conversation.tip_id

    def first_token_s(self) -> float:
        self._session.move_tip(self._tip)
        return _ask(self._session, self._words.text(_WORDS), 1).timing.ttft_s


class _Words:
    """Random words, always the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, count: int) -> str:
        return " ".join(self._word() for _ in range(max(1, count)))

    def _word(self) -> str:
        return "".join(self._random.choices("aeioubdfgklmnprst", k=self._random.randint(2, 7)))


def _ask(session: ChatSession, text: str, max_tokens: int) -> AnswerEnded:
    options = AskOptions(SamplingParams(temperature=0.0), seed=1, max_tokens=max_tokens)
    for event in session.ask(text, options):
        if isinstance(event, AnswerFailed):
            raise event.error
        if isinstance(event, AnswerEnded):
            ended = event
    return ended
