"""Reply: events become text, turns and saved lines; nothing waits longer than a second."""

import threading

import pytest

from kvchat.chat import reply as reply_module
from kvchat.chat.events import (
    AnswerEnded,
    AnswerFailed,
    AnswerText,
    ChatEvent,
    ReadingPrompt,
    SavingFailed,
)
from kvchat.chat.reply import SAVE_INTERVAL_S, Reply
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import GenerationError
from kvchat.core.events import PrefillProgress, RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import CachedTokens, FinishReason, Timing, Usage
from support.clock import Clock
from support.tokenizer_zoo import byte_level, text_files

TOKENIZER = ChatTokenizer(text_files(byte_level()))
STOP, CANCELLED = FinishReason.STOP, FinishReason.CANCELLED


class Notebook:
    """A ledger that writes down what it is told; `problem` is its answer to everything."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []
        self.problem: str | None = None

    def begin_answer(self, sample: int) -> str | None:
        self.lines.append(("begin", sample))
        return self.problem

    def extend_answer(self, sample: int, text: str, token_ids: list[int]) -> str | None:
        self.lines.append(("extend", sample, text, len(token_ids)))
        return self.problem

    def end_answer(self, sample: int, event: SampleFinished) -> tuple[int, str | None]:
        self.lines.append(("end", sample, event.reason))
        return 10 + sample, self.problem

    def abandon(self, error: RequestFailed) -> str | None:
        self.lines.append(("abandon",))
        return self.problem


class Talk:
    """A reply whose events a test sends itself."""

    def __init__(
        self, num_samples: int = 1, stops: tuple[str, ...] = (), starts_thinking: bool = False
    ) -> None:
        self.ledger, self.clock = Notebook(), Clock()
        answers = [(TOKENIZER.new_stream([]), stops, starts_thinking) for _ in range(num_samples)]
        self.reply = Reply(self.ledger, answers, clock=self.clock)

    def say(self, text: str, sample: int = 0) -> list[ChatEvent]:
        for token in byte_level().encode(text, add_special_tokens=False).ids:
            self.reply.listen(TokensGenerated(1, sample, (token,)))
        return self.reply.poll()

    def end(self, reason: FinishReason = STOP, sample: int = 0) -> list[ChatEvent]:
        self.reply.listen(SampleFinished(1, sample, reason, Usage(), Timing()))
        return self.reply.poll()


def text_of(events: list[ChatEvent]) -> str:
    return "".join(e.text for e in events if isinstance(e, AnswerText) and not e.is_thinking)


def test_text_comes_as_it_is_generated_and_the_end_brings_it_whole() -> None:
    talk = Talk()

    assert text_of(talk.say("Hello")) == "Hello"
    [*_, ended] = [*talk.say(" 好"), *talk.end()]

    assert isinstance(ended, AnswerEnded)
    assert (ended.text, ended.thinking, ended.turn_id) == ("Hello 好", "", 10)
    assert talk.reply.is_finished


def test_the_first_token_is_saved_at_once_and_later_ones_each_second() -> None:
    talk = Talk()
    talk.say("H")
    assert talk.ledger.lines == [("begin", 0), ("extend", 0, "H", 1)]

    talk.clock.now_s += SAVE_INTERVAL_S / 2
    talk.say("ow")
    assert len(talk.ledger.lines) == 2

    talk.clock.now_s += SAVE_INTERVAL_S / 2
    talk.reply.poll()
    assert talk.ledger.lines[2:] == [("extend", 0, "ow", 2)]

    talk.say("dy")
    talk.end()
    assert talk.ledger.lines[3:] == [("extend", 0, "dy", 2), ("end", 0, STOP)]


def test_every_id_is_saved_even_where_it_has_no_text_yet() -> None:
    talk = Talk()
    talk.say("😀")
    talk.end()

    saved = [line for line in talk.ledger.lines if line[0] == "extend"]
    assert sum(line[3] for line in saved) == len(byte_level().encode("😀").ids)  # type: ignore[misc]
    assert "".join(str(line[2]) for line in saved) == "😀"


def test_a_character_that_was_cut_off_is_shown_as_its_replacement() -> None:
    talk = Talk()
    for token in byte_level().encode("a😀").ids[:-1]:
        talk.reply.listen(TokensGenerated(1, 0, (token,)))
    events = [*talk.reply.poll(), *talk.end(CANCELLED)]

    assert text_of(events).startswith("a\ufffd")


def test_a_stop_string_ends_the_text_and_what_was_held_for_one_is_given_back() -> None:
    stopped, cut = Talk(stops=("\nUser",)), Talk(stops=("\nUser",))

    first = [*stopped.say("Fine.\nUser"), *stopped.end()]
    second = [*cut.say("Fine.\nUs"), *cut.end(CANCELLED)]

    assert text_of(first) == "Fine."
    assert text_of(second) == "Fine.\nUs"
    saved_ids = sum(int(str(line[3])) for line in stopped.ledger.lines if line[0] == "extend")
    assert saved_ids == len(byte_level().encode("Fine.\nUser").ids)


def test_thinking_is_told_apart_and_kept_in_what_is_saved() -> None:
    talk = Talk(starts_thinking=True)

    [*_, ended] = [*talk.say("hm\n</think>\n\nYes."), *talk.end()]

    assert isinstance(ended, AnswerEnded)
    assert (ended.thinking, ended.text) == ("hm", "Yes.")
    saved = "".join(str(line[2]) for line in talk.ledger.lines if line[0] == "extend")
    assert saved == "hm\n</think>\n\nYes."


def test_stopped_before_the_first_token_there_is_no_answer_to_keep() -> None:
    talk = Talk()

    [ended] = talk.end(CANCELLED)

    assert isinstance(ended, AnswerEnded)
    assert talk.ledger.lines == [("end", 0, CANCELLED)]


def test_an_answer_that_stops_at_once_is_an_empty_answer() -> None:
    talk = Talk()
    talk.end(STOP)

    assert talk.ledger.lines == [("begin", 0), ("end", 0, STOP)]


def test_samples_are_kept_apart_and_the_reply_ends_with_the_last() -> None:
    talk = Talk(num_samples=3)
    talk.say("one", 0)
    talk.say("two", 1)
    talk.end(STOP, 1)
    assert not talk.reply.is_finished
    talk.end(STOP, 0)
    [*_, last] = talk.end(CANCELLED, 2)

    assert isinstance(last, AnswerEnded)
    assert last.sample == 2
    assert talk.reply.is_finished
    assert ("begin", 2) not in talk.ledger.lines


def test_a_failure_keeps_what_there_is_and_ends_everything() -> None:
    talk = Talk(num_samples=2)
    talk.say("par", 0)
    talk.clock.now_s += 0.1
    talk.say("tial", 0)
    talk.reply.listen(RequestFailed(1, GenerationError("boom")))

    [failed] = talk.reply.poll()

    assert isinstance(failed, AnswerFailed)
    assert talk.ledger.lines[-2:] == [("extend", 0, "artial", 6), ("abandon",)]
    saved = "".join(str(line[2]) for line in talk.ledger.lines if line[0] == "extend")
    assert saved == "partial"
    assert talk.reply.is_finished


def test_trouble_with_saving_is_told_and_the_answer_goes_on() -> None:
    talk = Talk()
    talk.ledger.problem = "disk full"

    events = [*talk.say("Hi"), *talk.end()]

    assert SavingFailed("disk full") in events
    assert text_of(events) == "Hi"
    assert isinstance(events[-1], AnswerEnded)


def test_iterating_waits_for_events_and_ends_with_the_reply() -> None:
    talk = Talk()
    timer = threading.Timer(0.05, lambda: (talk_listen(talk),))
    timer.start()

    events = list(talk.reply)

    timer.join()
    assert text_of(events) == "hi"
    assert isinstance(events[-1], AnswerEnded)


def test_a_reader_is_not_woken_for_each_token_and_hears_of_the_end_at_once(monkeypatch):
    """Each token once woke the reader, which took a core from the step of the next token."""
    talk = Talk()
    pauses: list[float] = []

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            for token in byte_level().encode("bcd", add_special_tokens=False).ids:
                talk.reply.listen(TokensGenerated(1, 0, (token,)))
            assert not self.is_set()
            talk.reply.listen(SampleFinished(1, 0, STOP, Usage(), Timing()))
            return self.is_set()

    monkeypatch.setattr(talk.reply, "_has_ended", Ended())
    for token in byte_level().encode("a", add_special_tokens=False).ids:
        talk.reply.listen(TokensGenerated(1, 0, (token,)))

    assert text_of(list(talk.reply)) == "abcd"
    assert len(pauses) == 1
    assert 0 < pauses[0] < 0.05


def test_a_reader_does_not_pause_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token follows the progress of its prompt, and was heard 20 ms after it."""
    talk = Talk()
    pauses: list[int] = []

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(talk.reply.num_tokens)
            return True

    monkeypatch.setattr(talk.reply, "_has_ended", Ended())
    talk.reply.listen(PrefillProgress(1, CachedTokens(), 1, 2))
    events = iter(talk.reply)
    assert isinstance(next(events), ReadingPrompt)
    timer = threading.Timer(0.05, lambda: (talk_listen(talk),))
    timer.start()

    assert text_of(list(events)) == "hi"
    timer.join()
    assert 0 not in pauses


def test_waiting_for_a_slow_model_saves_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a token takes longer than a second, what came before it is saved meanwhile."""
    monkeypatch.setattr(reply_module, "SAVE_INTERVAL_S", 0.01)
    talk = Talk()
    talk.say("H")
    talk.say("ow")
    assert talk.ledger.lines[-1] == ("extend", 0, "H", 1)
    talk.clock.now_s += 1.0
    events = iter(talk.reply)
    saved = threading.Event()
    talk.ledger.lines = WatchedList(talk.ledger.lines, saved)
    ender = threading.Thread(target=lambda: (saved.wait(60.0), talk_end(talk)))
    ender.start()

    assert isinstance(list(events)[-1], AnswerEnded)

    ender.join()
    assert talk.ledger.lines[2:] == [("extend", 0, "ow", 2), ("end", 0, STOP)]


class WatchedList(list[tuple[object, ...]]):
    """Says when something is appended."""

    def __init__(self, content: list[tuple[object, ...]], event: threading.Event) -> None:
        super().__init__(content)
        self._event = event

    def append(self, line: tuple[object, ...]) -> None:
        super().append(line)
        self._event.set()


def talk_end(talk: Talk) -> None:
    talk.reply.listen(SampleFinished(1, 0, STOP, Usage(), Timing()))


def talk_listen(talk: Talk) -> None:
    for token in byte_level().encode("hi").ids:
        talk.reply.listen(TokensGenerated(1, 0, (token,)))
    talk.reply.listen(SampleFinished(1, 0, STOP, Usage(), Timing()))


def test_whoever_shows_the_reply_is_told_once_of_what_waits_and_of_each_end() -> None:
    told: list[int] = []
    reply = Reply(
        Notebook(), [(TOKENIZER.new_stream([]), (), False)], notify=lambda: told.append(1)
    )
    progress = PrefillProgress(1, CachedTokens(), 1, 2)

    for _ in range(3):
        reply.listen(progress)
    assert len(told) == 1
    assert len(reply.poll()) == 3
    reply.listen(progress)
    assert len(told) == 2
    reply.listen(RequestFailed(1, GenerationError("x")))
    assert len(told) == 3
    assert len(reply.poll()) == 2


def test_cancelling_before_there_is_anything_to_cancel_is_harmless() -> None:
    talk = Talk()
    talk.reply.cancel()
    asked: list[FinishReason] = []
    talk.reply.on_cancel(asked.append)

    talk.reply.cancel(FinishReason.TIMEOUT)

    assert asked == [FinishReason.TIMEOUT]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(AssertionError):
        Talk(stops=("",))


def test_tokens_that_wait_are_shown_together() -> None:
    """Of a server that sends 60,000 pieces a second, the rest was shown for 8 s after its end."""
    talk = Talk(num_samples=2)
    ids = byte_level().encode("a long answer ", add_special_tokens=False).ids
    for _ in range(200):
        for token in ids:
            talk.reply.listen(TokensGenerated(1, 0, (token,)))
    for token in ids:
        talk.reply.listen(TokensGenerated(1, 1, (token,)))
    talk.reply.listen(SampleFinished(1, 0, FinishReason.TIMEOUT, Usage(), Timing()))

    events = talk.reply.poll()

    texts = [event for event in events if isinstance(event, AnswerText)]
    assert [(event.sample, event.text) for event in texts] == [
        (0, "a long answer " * 200),
        (1, "a long answer "),
    ]
    assert isinstance(events[-1], AnswerEnded)
    assert talk.reply.num_tokens == 201 * len(ids)
