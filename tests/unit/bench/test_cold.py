"""`bench cold`: its comparison, its refusals, and one run with real processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from kvchat.bench import processes
from kvchat.bench.cold import Chats, measured
from kvchat.bench.processes import Answered, ProcessFailed, answer, private_home
from kvchat.bench.report import Result
from kvchat.bench.scenarios import scenario
from kvchat.bench.setup import BenchSetup
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.text import Size
from kvchat.model.checkpoint.source import ModelSource, find_model
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.commands import Shell
from support.fork_server import ForkedLife, ForkServer

BLOCK = 16
OTHERS = Path("/others")


@dataclass
class FakeProcesses:
    """Processes of a program that keeps all full blocks of a conversation, by their arguments.

    A process takes 5 s, one that goes on a quarter more, and each later one 1 s more than that.
    """

    num_tokens: int = 0
    num_lost: int = 0
    computed_text: str = "yes"
    asked: list[Sequence[str]] = field(default_factory=list)

    def ask(self, arguments: Sequence[str], message: str) -> Answered:
        self.asked.append(arguments)
        goes_on, computes = "-c" in arguments, "--no-cache" in arguments
        first_s = (5.0 + len(self.asked)) * (1.25 if goes_on else 1.0)
        prompt_tokens = len(message) + (self.num_tokens if goes_on else 0)
        kept = self.num_tokens // BLOCK * BLOCK
        disk = kept - self.num_lost if goes_on and not computes else 0
        if not computes:
            self.num_tokens = prompt_tokens
        text = self.computed_text if computes and goes_on else "yes"
        return Answered(first_s, 0.5, text, prompt_tokens, disk, 9, "cpu", "bfloat16")


def found(fake: FakeProcesses, repeats: int = 3) -> Result:
    setup = BenchSetup(
        ModelSource("tiny", Path("/tiny")), ModelConfig(), CacheConfig(BLOCK), repeats, False
    )
    return measured(setup, Chats(fake.ask, OTHERS), "tiny", "a" * 100)


def test_processes_that_go_on_are_compared_in_turn_with_such_that_begin() -> None:
    fake = FakeProcesses()

    result = found(fake)

    assert not result.refusal
    assert result.settings["history"] == 100
    begun, compared, warm_up, *turns = fake.asked
    assert "-c" not in begun
    assert compared[:4] == ["-c", "--last", "--no-cache", "--incognito"]
    assert compared[-1] == warm_up[-1] != "1"
    assert ["-c" in arguments for arguments in turns] == [False, True] * 3
    assert all(str(OTHERS) in arguments for arguments in turns[::2])
    whole, _, restored = result.figures
    assert (whole.value, whole.beside) == (12 * 1.25, 11)
    assert whole.ratio == 15 / 11
    assert restored.value == 96
    assert restored.beside == 108, "a message more each time, and one to warm up"


@pytest.mark.parametrize(
    ("fake", "refusal"),
    [
        (FakeProcesses(computed_text="no"), "resumed and recomputed answers differ"),
        (FakeProcesses(num_lost=BLOCK), "only 80 of 102 saved tokens came from the disk"),
    ],
    ids=["another answer", "read again"],
)
def test_what_was_not_resumed_is_not_reported(fake: FakeProcesses, refusal: str) -> None:
    result = found(fake)

    assert result.refusal == refusal
    assert not result.figures


def test_a_process_that_fails_is_told_by_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import sys; sys.stderr.write('first\\nlast\\n'); sys.exit(4)"
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", said))

    with pytest.raises(ProcessFailed, match=r"^kvchat ended with 4: last$"):
        answer([], os.environ, "hi")


def test_the_first_text_is_what_is_timed_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    end = (
        '{"event": "end", "text": "yes", "usage": {"prompt_tokens": 5, "prefilled_tokens": 2, '
        '"cached_tokens": {"disk": 3}}, "timing": {"ttft_s": 0.25}, '
        '"model": {"device": "cpu", "dtype": "float32"}}'
    )
    said = (
        "import sys, time\n"
        "assert sys.stdin.read() == 'hi'\n"
        f'for line in (\'{{"event": "start"}}\', \'{{"event": "delta"}}\', {end!r}):\n'
        "    print(line, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    monkeypatch.setattr(processes, "COMMAND", (sys.executable, "-c", said))
    ticks = iter([100.0, 101.0, 103.0, 107.0])
    monkeypatch.setattr(processes, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    assert answer([], os.environ, "hi") == Answered(3.0, 0.25, "yes", 5, 3, 2, "cpu", "float32")


def test_a_home_of_ones_own_has_no_settings_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCHAT_MODEL", "another")

    with private_home() as environment:
        own = {k: v for k, v in environment.items() if k == "HOME" or k.startswith("XDG_")}
        kvchats = [name for name in environment if name.startswith("KVCHAT_")]
        assert kvchats == ["KVCHAT_KERNEL_CACHE"], "machine code, and no setting"
        assert {name for name, path in own.items() if path.startswith(environment["HOME"])} >= {
            "HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME",
        }  # fmt: skip
        home = Path(environment["HOME"])
    assert not home.exists()


@dataclass(frozen=True)
class ForkedProcesses:
    """Stands in for `subprocess`: a process is a fork of one that has imported everything."""

    server: ForkServer
    PIPE: int = subprocess.PIPE

    def Popen(
        self,
        command: Sequence[str],
        env: dict[str, str],
        stdin: IO[bytes],
        stdout: int,
        stderr: IO[bytes],
    ) -> ForkedLife:
        assert tuple(command[:3]) == processes.COMMAND
        shell = Shell(Path(env["HOME"]), module="support.patient_kvchat")
        streams = {0: stdin.fileno(), 2: stderr.fileno()}
        return self.server.start(shell, *command[3:], variables=env, streams=streams)


@pytest.mark.matrix  # their parts have tests of their own
def test_real_processes_bring_a_conversation_back(tmp_path, monkeypatch, fork_server):
    monkeypatch.setattr(processes, "subprocess", ForkedProcesses(fork_server))
    model = never_stopping(tiny_model("llama", max_position_embeddings=4096))
    checkpoint = str(save_checkpoint(tmp_path, model))
    cache = CacheConfig(device_bytes=Size(num_bytes=64 << 20))
    setup = BenchSetup(find_model(checkpoint), ModelConfig(checkpoint), cache, 1, True)

    result = scenario("cold")(setup)

    assert not result.refusal
    whole, loaded, restored = result.figures
    assert whole.value > loaded.value / 1e3 > 0.0
    assert restored.value > 96
    assert whole.must == "1.1"
