"""The interactive chat with a scripted engine, in this process or in a pseudo-terminal.

Usage: python -m support.scripted_repl CHECKPOINT [--sessions DIR] [--history FILE] [--plain]
       [--spoken] [--loading FILE [--silent]] [--fail] [--continue] [--reflows] [--log FILE]
       [--kept DIR] [--tools DIR] [--attach FILE] [--gate FILE]

What is typed decides the answer: `lines 40` gives forty numbered lines, `slow 40` the same slowly,
`evil` tries to act on the terminal, `think` thinks first, `crash` makes the engine fail, `trouble`
its disk tier, with the sentence that follows, and `long 20000` is for measurements. `gated 60`
gives sixty words, the second half once the file of --gate is there. `call NAME JSON` calls a tool,
and the answer to its result begins with "I got". What is pressed twice within a minute is pressed
twice: a busy machine takes longer than fingers.
"""

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.attachment import read_attachment
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.chat.store import SessionStore
from kvchat.chat.turn_loop import LoadRelay
from kvchat.core.errors import ModelError
from kvchat.core.types import SamplingParams
from kvchat.terminal import keys, line_view
from kvchat.terminal.prompt import Terminal
from kvchat.terminal.repl import ReplSetup, run
from kvchat.terminal.theme import Look
from kvchat.tools.local_tools import local_tools
from kvchat.tools.toolbox import Tool, Toolbox
from support.scripted_engine import Loading, Script, ScriptedEngine, scripted_build, text_model

EVIL = (
    "title \x1b]0;owned\x07 clip \x1b]52;c;aGk=\x07 clear \x1b[2J\x1b[H link "
    "\x1b]8;;http://evil\x1b\\x\x1b]8;;\x1b\\ c1 \x9b31m bidi \u202eabc\u202c bell \x07 end"
)
MARKDOWN = """# Title

Some **bold** text and `code`, then a list:

- one
- two
  1. nested

```python
def f(x):
    return x  # comment
```

| a | b |
|---|---|
| 1 | 2 |

The end.
"""


def author(question: str, sample: int) -> Script:
    """Answer by the first word of the question."""
    words = question.split()
    word = words[0] if words else ""
    count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 20
    lines = "\n".join(f"line-{number:04} of the answer" for number in range(count))
    if word == "lines":
        return Script(lines, tokens_per_step=8, step_s=0.002)
    if word == "slow":
        return Script(lines, tokens_per_step=5, step_s=0.012)
    if word == "table":
        rows = "".join(f"| cell{n} | {'of a row ' * 6}end{n} |\n" for n in range(count))
        return Script(f"| a | b |\n|---|---|\n{rows}\nAfter it.", tokens_per_step=20, step_s=0.01)
    if word == "list":
        items = "".join(f"- cell{n} {'of an item ' * (n % 5 * 4)}end{n}\n" for n in range(count))
        return Script(items, tokens_per_step=12, step_s=0.008)
    if word == "prose":
        text = " ".join(f"word{number}" for number in range(count))
        return Script(text, tokens_per_step=5, step_s=0.008)
    if word == "long":  # so many bytes of Markdown, a hundred steps of four bytes a second
        text = MARKDOWN * (count // len(MARKDOWN) + 1)
        return Script(text[:count], tokens_per_step=4, step_s=0.01)
    if word == "read":
        return Script("It is read.", step_s=0.05, prefill_per_step=max(1, len(question) // count))
    if word == "./read:":  # a file of that name
        return Script("", step_s=0.05, prefill_per_step=8)
    if word == "evil":
        return Script(EVIL, tokens_per_step=3)
    if word == "markdown":
        return Script(MARKDOWN, tokens_per_step=3, step_s=0.005)
    if word == "trouble":
        return Script("All the same.", trouble=" ".join(words[1:]))
    if word == "think":
        return Script("<think>\nLet me see.\nYes.\n</think>\n\nThe answer is **42**.", 3, 0.005)
    if word == "call":
        called = json.dumps({"name": words[1], "arguments": json.loads(" ".join(words[2:]))})
        return Script(f"Let me see.\n<tool_call>\n{called}\n</tool_call>")
    if word == "<tool_response>":
        return Script(f"I got {question.removeprefix(word).removesuffix('</tool_response>')}")
    if "Summarise our conversation" in question:
        if question.endswith("an echo"):
            return Script(question, tokens_per_step=20)
        if question.endswith("slowly"):
            return Script(f"{lines}\n" * 30, tokens_per_step=5, step_s=0.012)
        if question.endswith("a crash"):
            return Script("", error=RuntimeError("as the script says"))
        if question.endswith("a refusal"):
            return Script("No.")
        if question.endswith("in words"):
            return Script("I'm sorry, I can't do that.")
        return Script("Numbered lines; Ada has a dog called Rex.", tokens_per_step=5, step_s=0.01)
    if word == "warn":
        sys.stderr.write("a library warns\n\x1b[31mtwice\n")
        sys.stderr.flush()
    if word == "crash":
        return Script("", error=RuntimeError("as the script says"))
    return Script(f"You said {question!r} ({sample}).", tokens_per_step=4, step_s=0.002)


def _gated(gate: Path | None, question: str, sample: int) -> Script:
    """Answer as `author`; "gated" is prose of which the second half waits for the gate."""
    if not question.startswith("gated "):
        return author(question, sample)
    prose = author(question.replace("gated", "prose", 1), sample)
    return replace(prose, step_s=0.002, until=gate)


class Echo:
    """A tool that returns what it is given."""

    name = "echo"
    description = "Say it again."
    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {}}

    is_allowed_by_call = False

    def run(self, arguments: Mapping[str, Any], stop: threading.Event) -> str:
        return str(dict(arguments))


class LateEcho:
    """`Echo`, which starts once a file is there."""

    def __init__(self, until: Path) -> None:
        self._until = until

    def when_started(self, tell: Callable[[], None]) -> None:
        def watch() -> None:
            while not self._until.exists():
                time.sleep(0.02)
            tell()

        threading.Thread(target=watch, daemon=True).start()

    def wait(self) -> tuple[list[Tool], tuple[str, ...]]:
        assert self._until.exists()
        return [Echo()], ("The MCP server gone does not answer: it is gone.",)

    def close(self) -> None:
        """Nothing runs."""


def main() -> int:
    arguments = parsed(sys.argv[1:])
    keys._TWICE_S = keys._ESCAPE_TWICE_S = line_view._TWICE_S = 60.0
    if arguments.reads_half:
        ScriptedEngine.read_ahead = read_half  # type: ignore[method-assign]
    if arguments.log is not None:
        logging.basicConfig(filename=arguments.log, level=logging.INFO)
    return run(chat_setup(arguments))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    for name in ("--sessions", "--history", "--loading", "--log", "--gate", "--kept", "--tools"):
        parser.add_argument(name, type=Path)
    for name in ("--plain", "--spoken", "--reflows", "--silent", "--fail", "--reads-half"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--continue", dest="continues", action="store_true")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--editor", default="vi")
    parser.add_argument("--late", type=Path)
    parser.add_argument("--attach", type=Path, action="append", default=[])
    return parser.parse_args(arguments)


def read_half(engine: ScriptedEngine, token_ids: list[int]) -> None:
    """Read half of what is to be read ahead, and stay there."""
    engine.cache.add(token_ids[: len(token_ids) // 2])


def chat_setup(arguments: argparse.Namespace, terminal: Terminal | None = None) -> ReplSetup:
    """Return the chat that the arguments ask for; it reads and draws at `terminal`."""
    failure = ModelError("The weights are broken.", "Download them again.")
    store = SessionStore(arguments.sessions) if arguments.sessions else None

    def new_host(name: str, hear, saved=None) -> ChatHost:  # type: ignore[no-untyped-def]
        if name == "missing":
            raise ModelError(f"There is no model {name}.", "Check the spelling.")
        if name == "slow-download":
            sys.stderr.write("downloading\n")
            time.sleep(60)
        model = text_model(arguments.checkpoint)
        build = scripted_build(
            model,
            partial(_gated, arguments.gate),
            Loading(arguments.loading, arguments.silent) if arguments.loading else None,
            failure if arguments.fail or name == "broken" else None,
            arguments.context,
        )
        return ChatHost(model, build, store, hear)  # type: ignore[arg-type]

    relay = LoadRelay()
    host = new_host("scripted", relay.hear)
    is_plain = arguments.plain or arguments.spoken
    session = host.open_session(store.latest()) if arguments.continues and store else None
    late = LateEcho(arguments.late) if arguments.late else None
    toolbox = Toolbox(local_tools(arguments.tools), late=late) if arguments.tools else None
    options = AskOptions(
        sampling=SamplingParams(temperature=0.0), max_calls=None if toolbox is not None else 0
    )
    return ReplSetup(
        controller=ChatController(
            host,
            new_host,
            session,
            options,
            kept=StoreAdmin(arguments.kept) if arguments.kept else None,
            tools=toolbox.definitions if toolbox is not None else None,
            attached=tuple(map(read_attachment, arguments.attach)),
        ),
        toolbox=toolbox,
        relay=relay,
        history_path=arguments.history,
        look=Look(
            has_colour=not is_plain,
            is_plain=is_plain,
            is_spoken=arguments.spoken,
            reflows=arguments.reflows,
        ),
        editor=arguments.editor,
        terminal=terminal,
    )


if __name__ == "__main__":
    sys.exit(main())
