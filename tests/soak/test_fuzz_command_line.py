"""Random command lines, variables, files and input: kvchat ends with a documented exit code.

The tests do not check the text of answers. They check that a refusal is one clear sentence.
"""

import os
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvchat.core.parameters import PARAMETERS, Kind
from support.checkpoints import save_checkpoint, tiny_model
from support.commands import Shell
from support.fork_server import ForkServer
from support.soak_sizes import short_and_long

_CODES = {0, 1, 2, 3, 4, 5, 6, 124, 129, 130, 141, 143}
# Loading a model that stays loaded, an odd value, odd input, a cut answer.
_MAX_LINES = 4
# No input can take the machine's memory.
_ADDRESS_SPACE_BYTES = 12 << 30
_DEADLINE_S = 90.0
_NUMBERS = (
    *("0", "-1", "1", "2", "0.5", "1e10", "1e400", "-1e400", "inf", "nan", "-0", "9" * 19),
    *("9" * 400, "9" * 5000, "\u0663", "\u00b2", "0x10", "1_0", "1e-320", str(2**63), "", " 1 "),
)
_SIZES = ("0", "8G", "1M", "5%", "101%", "-1G", "9" * 400 + "G", "1e9G", "5x", "\u0663G", "1", "")
_TEXTS = ("", " ", "x", "\udcff", "a\nb", "\x1b[2J", "y" * 300, "y" * 5000, "..", "/", "~", "~no/x")
_LINES = (
    *(b'{"prompt": "hi"}', b'{"prompt": ""}', b'{"id": NaN, "prompt": "x"}', b"[" * 100_000, b"{"),
    *(b'{"prompt": "x", "id": ' + b"[" * 500 + b"]" * 500 + b"}", b'{"prompt": "\\ud800"}', b"\0"),
    *(b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}", b'{"prompt": "x", "id": 1e999}'),
    *(
        b'{"prompt": "x", "top_k": 1e30}',
        b'{"prompt": "x", "seed": -1}',
        b"/help",
        b"/undo",
        b"\xff",
    ),
    *(b'{"prompt": "x", "stop": [""]}', b"/set top-k 99999999999999999999", b"/file /", b"hello"),
    *(b'{"prompt": "x", "n": 5}', b'{"messages": [{"role": "system"}]}', b"/system @/", b"/edit 9"),
)
_DOCUMENTS = (
    *(b"", b"temperature = ", b"seed = 1" + b"0" * 5000, b"top_k = 0x" + b"f" * 5000),
    *(
        b"temperature = 1979-05-27",
        b"a = " + b"[" * 20_000,
        b"temperature = inf",
        b"[model]\nx = 1",
    ),
    *(b"\xff\xfe", b'model = "a\\u0000b"', b'stop = ["", 5]', b"timeout = 1e10", b"seed = true"),
    *(b'{"kvchat":"session","version":1}\n', b'{"kvchat":"session","version":99}\n', b"[" * 5000),
    *(b'[{"role": "user", "content": "x"}]', b'{"messages": 5}', b'{"messages": [null]}', b"null"),
    b'{"kvchat":"session","version":1,"id":"x","created":1e300,"system":null,"model":"x"}\n',
    b'{"kvchat":"session","version":1,"id":"x","created":1,"system":null,"model":"x"}\n'
    b'{"type":"turn","id":1,"parent":1}\n{"type":"tip","id":9}\n[[[[\n{"type":"tit',
)


@dataclass
class Case:
    """One command line in surroundings of its own, below `place`."""

    place: Path
    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    stdin: bytes = b""

    def end_on(self, server: ForkServer) -> int:
        """Run kvchat to its end; return its exit code, or -9 where it had to be ended."""
        (self.place / "stdin").write_bytes(self.stdin)
        with ExitStack() as opened:
            files = zip(("stdin", "stdout", "stderr"), ("rb", "wb", "wb"), strict=True)
            streams = [opened.enter_context((self.place / name).open(how)) for name, how in files]
            life = server.start(
                Shell(self.place / "work"),
                *self.arguments,
                variables={"HOME": str(self.place / "home"), **self.variables},
                streams={number: stream.fileno() for number, stream in enumerate(streams)},
                most_address_bytes=_ADDRESS_SPACE_BYTES,
            )
            with life:
                try:
                    return life.wait(_DEADLINE_S)
                except TimeoutError:
                    life.kill()
                    return life.wait()


class CaseMaker:
    """Draws cases from a seed."""

    def __init__(self, seed: int, model: str) -> None:
        self._random = random.Random(seed)
        self._model = model

    def case(self, place: Path) -> Case:
        for name in ("home", "work"):
            (place / name).mkdir(parents=True)
        case = Case(place)
        self._spoil_files(case)
        for setting in self._random.sample(PARAMETERS, self._random.choice((0, 0, 1, 2))):
            value = self._value(setting.kind)
            if "\0" not in value:
                case.variables[setting.variable] = value
        case.arguments = self._arguments(case)
        lines = self._random.sample(_LINES, self._random.choice((0, 1, 2, 5)))
        case.stdin = b"\n".join(lines)
        return case

    def _value(self, kind: Kind) -> str:
        choices = _NUMBERS if kind in (Kind.WHOLE, Kind.NUMBER) else (*_TEXTS, *_SIZES)
        return self._random.choice(choices)

    def _spoil_files(self, case: Case) -> None:
        home, work = case.place / "home", case.place / "work"
        self._spoil(home / ".config/kvchat/config.toml", 0.2)
        self._spoil(home / ".local/share/kvchat/sessions", 0.1)
        self._spoil(home / ".local/share/kvchat/sessions/20260101-000000-0001.jsonl", 0.4)
        self._spoil(home / ".local/state/kvchat/history", 0.1)
        self._spoil(home / ".cache/kvchat/kv", 0.1)
        self._spoil(work / "thing", 1.0)

    def _spoil(self, path: Path, share: float) -> None:
        """Put something in the place of a file: a document, a pipe, a loop, a directory."""
        if self._random.random() > share:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            kind = self._random.choice(("document",) * 6 + ("pipe", "loop", "directory", "null"))
            if kind == "document":
                path.write_bytes(self._random.choice(_DOCUMENTS))
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "directory":
                path.mkdir()
            else:
                path.symlink_to(path.name if kind == "loop" else os.devnull)
        except OSError:
            return  # what is in its way is odd enough

    def _arguments(self, case: Case) -> list[str]:
        text = self._random.choice(_TEXTS)
        name = self._random.choice(("thing", "missing", text or "x"))
        commands = (
            ["config", "show"],
            ["config", "set", self._random.choice(PARAMETERS).name, self._random.choice(_NUMBERS)],
            ["sessions"],
            ["sessions", "show", self._random.choice(("2026", text))],
            [
                "sessions",
                "export",
                "2026",
                "--format",
                self._random.choice(("md", "json", "jsonl")),
            ],
            ["sessions", "import", name],
            ["sessions", "rename", "2026", text],
            ["cache", "--cache-dir", name, "status"],
            ["cache", "tree"],
            [self._random.choice(_TEXTS), text],
            self._chat(name, text),
            self._chat(name, text),
            self._chat(name, text),
            self._chat(name, text),
        )
        return self._random.choice(commands)

    def _chat(self, name: str, text: str) -> list[str]:
        arguments = ["--max-tokens", "2"]
        arguments += ["-m", self._model] if self._random.random() < 0.8 else ["-m", name]
        for setting in self._random.sample(PARAMETERS, self._random.choice((0, 1, 1, 2))):
            if setting.kind is not Kind.SWITCH:
                arguments += [setting.flag, self._value(setting.kind)]
        extras = (
            ["-p", text],
            ["-p", "hi"],
            ["--json", "-p", "hi"],
            ["-f", name, "-p", "hi"],
            ["-c", "--last", "-p", "hi"],
            ["-r", text, "-p", "hi"],
            ["--input-format", "lines"],
            ["--input-format", "jsonl"],
            ["--input-format", "jsonl", "--output-format", "stream-json"],
            ["--cache-dir", name, "-p", "hi"],
            ["--sessions-dir", name, "-p", "hi"],
            ["-n", self._random.choice(_NUMBERS), "-p", "hi"],
            [],
        )
        return arguments + self._random.choice(extras)


def _faults(case: Case, code: int) -> list[str]:
    """Return what is wrong with how a command ended."""
    told = (case.place / "stderr").read_bytes().decode(errors="replace")
    faults = []
    if code not in _CODES:
        faults.append(f"exit code {code}")
    if "Traceback" in told or "This is a bug" in told:
        faults.append("not foreseen")
    is_script = "--input-format" in case.arguments  # which has a sentence for each of its lines
    if not is_script and told.count("\n") > _MAX_LINES:
        faults.append("more than a few sentences")
    if code == 2 and not told.startswith("kvchat: "):
        faults.append("no sentence")
    left = {path.name for path in (case.place / "work").iterdir()} - {"thing"}
    if left - set(case.arguments) - {"y" * 300, "kv"} - set(case.variables.values()):
        faults.append(f"left {sorted(left)} in the directory it was started from")
    return faults


@short_and_long(6, int(os.environ.get("FUZZ_COMMAND_LINES", "3000")))
def test_every_command_line_ends_with_a_documented_code_and_a_sentence(fork_server, tmp_path, size):
    model = str(save_checkpoint(tmp_path / "model", tiny_model("llama")))
    seed = int(os.environ.get("FUZZ_SEED", "1"))
    maker = CaseMaker(seed, model)
    found = []
    for number in range(size):
        case = maker.case(tmp_path / str(number))
        if faults := _faults(case, case.end_on(fork_server)):
            told = (case.place / "stderr").read_bytes()[-1500:]
            found.append((number, faults, case.arguments, case.variables, case.stdin[:200], told))

    assert not found, "\n\n".join(str(each)[:3000] for each in found[:8])
