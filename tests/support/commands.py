"""Runs the kvchat command in a home directory of its own, as a user's shell would."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENT = "support.patient_kvchat"
TIMEOUT_S = 180


@dataclass(frozen=True)
class Shell:
    """A user's surroundings: a home directory and an environment without kvchat's variables."""

    home: Path
    module: str = "kvchat"

    @property
    def patient(self) -> "Shell":
        """The same, but kvchat waits for what it has kept however slow the machine is."""
        return replace(self, module=PATIENT)

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "KVCHAT_KERNEL_CACHE" or not name.startswith(("KVCHAT_", "XDG_"))
        }
        paths = os.pathsep.join(str(ROOT / part) for part in ("", "kernels", "tests"))
        return {**kept, "HOME": str(self.home), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", self.module, *arguments]

    def run(
        self, *arguments: str, stdin: bytes | None = None, **variables: str
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run kvchat to its end; standard input is empty where none is given."""
        return subprocess.run(
            self.command(*arguments),
            input=stdin if stdin is not None else b"",
            env={**self.environment, **variables},
            capture_output=True,
            timeout=TIMEOUT_S,
            cwd=self.home,
        )

    def run_on_full_disk(
        self, num_blocks: int, *arguments: str, stdin: bytes = b""
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run kvchat where no file may grow beyond so many KiB, which fails as a full disk does."""
        command = f"ulimit -f {num_blocks}; trap '' XFSZ; exec {' '.join(self.command(*arguments))}"
        return subprocess.run(
            ["bash", "-c", command],
            input=stdin,
            env={**self.environment, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=TIMEOUT_S,
            cwd=self.home,
        )

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start kvchat with pipes at all three ends."""
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.home,
        )

    @property
    def sessions(self) -> list[Path]:
        return sorted((self.home / ".local/share/kvchat/sessions").glob("*.jsonl"))


def objects(output: bytes) -> list[dict[str, Any]]:
    """The JSON objects that were printed, one a line."""
    return [json.loads(line) for line in output.splitlines()]
