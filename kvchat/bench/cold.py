"""Scenario `cold`: the cost of a long history for a new process.

Saves one conversation. Then new processes continue it (`kvchat -c`), alternating with processes
that load the same weights and have no history to restore. Both are timed from outside, from process
start to the first text. KV is read while the weights load, so the times should be nearly equal.
Uses the demo model if none is named, because random weights have no tokenizer. Gives no figures if
the history did not come from the disk, or if the answer differs from a full recomputation's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvchat.bench.measure import Sample
from kvchat.bench.processes import Answered, ProcessFailed, answer, engine_flags, private_home
from kvchat.bench.report import Figure, Result, compared
from kvchat.bench.setup import BenchSetup
from kvchat.chat.chat_model import ChatModel, read_chat_model
from kvchat.chat.text_codec import Segment
from kvchat.core.errors import KvchatError
from kvchat.model.checkpoint.source import find_model

_HISTORY = 3072
_DEMO = "demo"
_MESSAGE = "hi"
_PEER = "the same weights, no history"
_GO_ON = ("-c", "--last")  # the first process answers one prompt
_COMPARED_TOKENS = 8
# Sample lines from which the tokens per line are estimated.
_SAMPLE_LINES = 32

Ask = Callable[[Sequence[str], str], Answered]
"""Starts a process with these arguments; returns its answer to a message. Raises ProcessFailed."""


def run(setup: BenchSetup) -> Result:
    """Time processes that continue a conversation, and processes that start one."""
    is_demo = setup.model.name == _DEMO
    source = find_model(_DEMO) if is_demo else setup.source
    with private_home() as environment:
        flags = [*engine_flags(setup, source), "--temperature", "0", "--disk-cache", "8G"]
        chats = Chats(
            lambda arguments, message: answer([*flags, *arguments], environment, message),
            Path(environment["HOME"], "others"),
        )
        try:
            history = _text(read_chat_model(source), setup.scaled(_HISTORY))
            return measured(setup, chats, source.name, history)
        except (ProcessFailed, KvchatError) as failure:
            return Result("cold", {"model": source.name}, refusal=str(failure))


def _text(model: ChatModel, num_tokens: int) -> str:
    """Return a message of about `num_tokens` tokens."""

    def lines(count: int) -> str:
        return "\n".join(f"Ship {n} carries {n * 7 % 91} crates." for n in range(count))

    sample = model.tokenizer.encode([Segment(lines(_SAMPLE_LINES), is_inert=True)])
    return lines(max(1, num_tokens * _SAMPLE_LINES // len(sample)))


@dataclass(frozen=True, slots=True)
class Chats:
    """The processes that are compared. `ask` starts one; `begin` and `go_on` save the conversation.

    Processes without history save their sessions in the directory `elsewhere`, so that no later
    process continues them. They are not incognito, because an incognito process also stores no
    facts about the model, and then loads more slowly.
    """

    ask: Ask
    elsewhere: Path

    def begin(self, text: str) -> Answered:
        return self.ask(["--max-tokens", "1"], text)

    def go_on(self, max_tokens: int = 1) -> Answered:
        return self.ask([*_GO_ON, "--max-tokens", str(max_tokens)], _MESSAGE)

    def compute_all(self, max_tokens: int) -> Answered:
        """Answer the message that `go_on` sends next, without the cache and without saving."""
        arguments = [*_GO_ON, "--no-cache", "--incognito", "--max-tokens", str(max_tokens)]
        return self.ask(arguments, _MESSAGE)

    def begin_another(self) -> Answered:
        arguments = ["--no-cache", "--sessions-dir", str(self.elsewhere), "--max-tokens", "1"]
        return self.ask(arguments, _MESSAGE)


def measured(setup: BenchSetup, chats: Chats, name: str, history: str) -> Result:
    """Compare processes that continue after `history` with processes that start a conversation.

    Raises ProcessFailed if one does not answer.
    """
    made = chats.begin(history)
    settings = {
        "model": name,
        "dtype": made.dtype,
        "device": made.device,
        "history": made.prompt_tokens,
        "repeats": setup.repeats,
    }
    refused = partial(Result, "cold", settings)
    expected = chats.compute_all(_COMPARED_TOKENS)
    before = chats.go_on(_COMPARED_TOKENS)  # also puts every file into the page cache
    if before.text != expected.text:
        return refused(refusal="resumed and recomputed answers differ")
    resumed: list[Answered] = []
    others: list[Answered] = []
    for _ in range(setup.repeats):
        others.append(chats.begin_another())
        resumed.append(chats.go_on())
        # All full blocks are saved, and nothing else.
        if resumed[-1].disk_tokens + setup.cache.block_size <= before.prompt_tokens:
            return refused(
                refusal=f"only {resumed[-1].disk_tokens:,} of {before.prompt_tokens:,} saved "
                "tokens came from the disk"
            )
        before = resumed[-1]
    return Result("cold", settings, _figures(resumed, others))


def _figures(resumed: Sequence[Answered], others: Sequence[Answered]) -> tuple[Figure, ...]:
    ours, theirs = (Sample(tuple(each.first_s for each in runs)) for runs in (resumed, others))
    loaded, beside = (Sample(tuple(each.ttft_s for each in runs)) for runs in (resumed, others))
    last = resumed[-1]
    prompt = (last.prompt_tokens, "prompt tokens", last.prefilled_tokens, "tokens computed")
    whole = "kvchat -c, from process start to the first text"
    return (
        compared(whole, ours, theirs, "s", _PEER, must="1.1"),
        compared("its time to first token, model loaded", loaded, beside, "ms", _PEER),
        Figure("tokens restored", last.disk_tokens, "tokens", *prompt),
    )
