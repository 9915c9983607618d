"""Every error that a user can see, with its exit code and a hint.

The exit codes are part of the command line's contract. The command line, its scripts and the
interactive chat print these errors; all other code raises them or lets them pass.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes; scripts rely on the numbers."""

    OK = 0
    GENERATION = 1
    USAGE = 2
    MODEL = 3
    CONTEXT = 4
    SESSION_NOT_FOUND = 5
    STORE = 6
    TIMEOUT = 124
    HANGUP = 129
    INTERRUPT = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class KvchatError(Exception):
    """An error for the user: one sentence, and a hint on what to do next, "" for none."""

    exit_code = ExitCode.GENERATION

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class GenerationError(KvchatError):
    """The forward pass or the sampler failed while answering."""


class EngineEnded(GenerationError):
    """The engine is in another program, which has ended; another engine can take its place."""


class DeviceLost(GenerationError):
    """The GPU computes nothing more for this process: only another process can go on."""


class UsageError(KvchatError):
    """A flag, environment variable or configuration value that cannot be used."""

    exit_code = ExitCode.USAGE


class UnreadableFile(UsageError):
    """A file that the user named cannot be read, or is none of the kind that is wanted."""

    exit_code = ExitCode.STORE


class ModelError(KvchatError):
    """The model cannot be found, read or trusted."""

    exit_code = ExitCode.MODEL


class ModelUnsupported(ModelError):
    """The architecture keeps state that a paged KV cache cannot hold."""


class ContextTooLong(KvchatError):
    """The prompt does not fit in the context, or in the device cache.

    num_tokens   what the prompt has, or more than which it certainly has; None if not known
    limit        how many tokens the context holds; None if not known
    """

    exit_code = ExitCode.CONTEXT

    def __init__(
        self, message: str, hint: str = "", num_tokens: int | None = None, limit: int | None = None
    ) -> None:
        super().__init__(message, hint)
        self.num_tokens = num_tokens
        self.limit = limit


class SessionNotFound(KvchatError):
    """No saved conversation has this id."""

    exit_code = ExitCode.SESSION_NOT_FOUND


class StoreError(KvchatError):
    """A session file or a directory cannot be locked, read or written."""

    exit_code = ExitCode.STORE


class StoreInUse(StoreError):
    """Another process holds a lock on the store. This passes: the caller may try again."""


class TimedOut(KvchatError):
    """The time limit the user set ran out before the answer was complete."""

    exit_code = ExitCode.TIMEOUT


def in_one_line(error: BaseException) -> str:
    """Return an error of any library as its type and the beginning of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
