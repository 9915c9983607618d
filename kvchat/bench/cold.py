"""Scenario `cold`: what it costs a whole process that a conversation has a long history.

One conversation is made and kept. Then new processes go on with it, `kvchat -c`, in turn with
others that load the same weights and have nothing to bring back; both are timed from outside, from
their start to the first text. What is read while the weights load costs nothing, so that there
should be little between them. The demo model, where no other is named: random weights have no
tokenizer. No figure where the history was not brought back from the disk, or where the answer is
another one than of a process that computes all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvchat.bench.measure import Sample
from kvchat.bench.processes import Answered, ProcessFailed, answer, private_home
from kvchat.bench.report import Figure, Result
from kvchat.bench.setup import BenchSetup
from kvchat.chat.chat_model import ChatModel, read_chat_model
from kvchat.chat.tokenizer import Segment
from kvchat.core.config import Size
from kvchat.core.errors import KvchatError
from kvchat.model.source import find_model

_HISTORY = 3072
_DEMO = "demo"
_MESSAGE = "hi"
_COMPARED_TOKENS = 8
# Enough lines to learn from how many tokens one has.
_SAMPLE_LINES = 32

Ask = Callable[[Sequence[str], str], Answered]
"""Has a new process with these arguments answer a message. Raises ProcessFailed."""


def run(setup: BenchSetup) -> Result:
    """Time processes that go on with a conversation, and others that begin one."""
    is_demo = setup.model.name == _DEMO
    source = find_model(_DEMO) if is_demo else setup.source
    with private_home() as environment:
        flags = [*_flags(setup), "--model", _DEMO if is_demo else str(source.directory)]
        chats = Chats(
            lambda arguments, message: answer([*flags, *arguments], environment, message),
            Path(environment["HOME"], "others"),
        )
        try:
            history = _text(read_chat_model(source), setup.scaled(_HISTORY))
            return measured(setup, chats, source.name, history)
        except (ProcessFailed, KvchatError) as failure:
            return Result("cold", {"model": source.name}, refusal=str(failure))


def _flags(setup: BenchSetup) -> list[str]:
    model, cache = setup.model, setup.cache
    flags = ["--temperature", "0", "--disk-cache", "8G", "--block-size", str(cache.block_size)]
    flags += ["--device", model.device, "--dtype", model.dtype, "--weights", model.weights]
    if model.threads is not None:
        flags += ["--threads", str(model.threads)]
    if cache.device_bytes is not None:
        flags += ["--device-cache", _size(cache.device_bytes)]
    return flags


def _size(size: Size) -> str:
    return str(size.num_bytes) if size.num_bytes is not None else f"{100 * (size.share or 0)}%"


def _text(model: ChatModel, num_tokens: int) -> str:
    """Return a message of about so many tokens."""

    def lines(count: int) -> str:
        return "\n".join(f"Ship {n} carries {n * 7 % 91} crates." for n in range(count))

    sample = model.tokenizer.encode([Segment(lines(_SAMPLE_LINES), is_inert=True)])
    return lines(max(1, num_tokens * _SAMPLE_LINES // len(sample)))


@dataclass(frozen=True, slots=True)
class Chats:
    """The processes that are compared. Each is new; what `begin` and `go_on` say is kept.

    `ask` starts one. Those that have nothing to bring back keep their words in `elsewhere`, where
    no chat goes on with them. They are not incognito: then nothing is remembered of the model
    either, and loading it takes longer.
    """

    ask: Ask
    elsewhere: Path

    def begin(self, text: str) -> Answered:
        return self.ask(["--max-tokens", "1"], text)

    def go_on(self, max_tokens: int = 1) -> Answered:
        return self.ask(["-c", "--max-tokens", str(max_tokens)], _MESSAGE)

    def compute_all(self, max_tokens: int) -> Answered:
        """Answer what `go_on` would be asked next, and leave no trace."""
        arguments = ["-c", "--no-cache", "--incognito", "--max-tokens", str(max_tokens)]
        return self.ask(arguments, _MESSAGE)

    def begin_another(self) -> Answered:
        arguments = ["--no-cache", "--sessions-dir", str(self.elsewhere), "--max-tokens", "1"]
        return self.ask(arguments, _MESSAGE)


def measured(setup: BenchSetup, chats: Chats, name: str, history: str) -> Result:
    """Compare processes that go on after `history` with such as begin another conversation.

    Raises ProcessFailed where one does not answer.
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
    before = chats.go_on(_COMPARED_TOKENS)  # by now all that is read has been read before
    if before.text != expected.text:
        return refused(refusal="resumed and recomputed answers differ")
    resumed: list[Answered] = []
    others: list[Answered] = []
    for _ in range(setup.repeats):
        others.append(chats.begin_another())
        resumed.append(chats.go_on())
        # Only full blocks are kept, and all of those.
        if resumed[-1].disk_tokens + setup.cache.block_size <= before.prompt_tokens:
            return refused(
                refusal=f"of {before.prompt_tokens:,} tokens that were kept only "
                f"{resumed[-1].disk_tokens:,} came from the disk"
            )
        before = resumed[-1]
    return Result("cold", settings, _figures(resumed, others))


def _figures(resumed: Sequence[Answered], others: Sequence[Answered]) -> tuple[Figure, ...]:
    ours, theirs = (Sample(tuple(each.first_s for each in runs)) for runs in (resumed, others))
    loaded, beside = (Sample(tuple(each.ttft_s for each in runs)) for runs in (resumed, others))
    last = resumed[-1]
    return (
        Figure(
            "kvchat -c, from its start to the first text",
            ours.median,
            "s",
            theirs.median,
            "the same weights, nothing to bring back",
            ours.median / theirs.median,
            "times that",
            "1.1",
            ours.spread,
        ),
        Figure(
            "its first token, model loaded",
            loaded.median * 1e3,
            "ms",
            beside.median * 1e3,
            "the same weights, nothing to bring back",
            loaded.median / beside.median,
            "times that",
            spread=loaded.spread,
        ),
        Figure(
            "tokens restored",
            last.disk_tokens,
            "tokens",
            last.prompt_tokens,
            "prompt tokens",
            last.prefilled_tokens,
            "tokens computed",
        ),
    )
