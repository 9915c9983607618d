"""`kvchat doctor`: checks the installation. One screen; exit 0 only if all is well.

Each check is independent of the others.
"""

import errno
import importlib.metadata
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvchat import __version__
from kvchat.cache.disk.quota import nearest_existing
from kvchat.cli.build import session_store, settings_of, store_admin, user_paths
from kvchat.cli.log_file import LOG_NAME
from kvchat.cli.shared_cache import shared_config, without_password
from kvchat.core.config import SharedConfig
from kvchat.core.errors import ExitCode, KvchatError, StoreError
from kvchat.core.paths import private_directory, require_working_directory
from kvchat.core.text import format_bytes
from kvchat.terminal.cache_lines import used_of_limit
from kvchat_kernels.cpu.level import CPU_VARIABLE

_LOW_SPACE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `advice` is set if there is a problem."""

    subject: str
    fact: str
    advice: str = ""


def examine(sessions_dir: str | None) -> int:
    """Print every finding; return the exit code."""
    require_working_directory()
    findings = [finding for check in _checks(sessions_dir) for finding in _run(check)]
    for finding in findings:
        mark = "!!" if finding.advice else "ok"
        line = f"{mark}  {finding.subject:12} {finding.fact}"
        sys.stdout.write(f"{line}\n" if not finding.advice else f"{line}\n    {finding.advice}\n")
    return ExitCode.GENERATION if any(finding.advice for finding in findings) else ExitCode.OK


Check = Callable[[], Iterator[Finding]]


def _run(check: Check) -> Iterator[Finding]:
    try:
        yield from check()
    except KvchatError as error:
        yield Finding(check.__name__.strip("_"), error.message, error.hint or "See above.")
    except (OSError, sqlite3.Error) as error:
        yield Finding(check.__name__.strip("_"), f"{error}", _disk_advice(error))
    except Exception as error:
        yield Finding(check.__name__.strip("_"), f"{type(error).__name__}: {error}", "Reinstall.")


def _disk_advice(error: OSError | sqlite3.Error) -> str:
    """Return advice for a disk error, where a new installation does not help."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "The disk is full: free some space."
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "It cannot be written to: check its permissions, or choose another directory."
    return "Check the disk."


def _checks(sessions_dir: str | None) -> tuple[Check, ...]:
    def sessions() -> Iterator[Finding]:
        flags = {"sessions_dir": sessions_dir}
        store = session_store(settings_of(flags))
        summaries = store.summaries()
        damaged = [s.session_id for s in summaries if not s.is_readable]
        advice = f"Cannot be read: {', '.join(damaged[:3])}." if damaged else ""
        yield Finding("sessions", f"{len(summaries)} in {store.directory}", advice)

    return (_versions, _terminal, _devices, _directories, _log_file, _kv, _shared, sessions, _demo)


def _versions() -> Iterator[Finding]:
    python = platform.python_version()
    advice = "" if sys.version_info >= (3, 11) else "kvchat needs Python 3.11 or newer."
    yield Finding("kvchat", f"{__version__} on Python {python}", advice)
    names = ("torch", "transformers", "tokenizers", "triton")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names if _has(name)]
    missing = [name for name in names if not _has(name)]
    needed = [name for name in missing if name != "triton" or sys.platform == "linux"]
    yield Finding(
        "packages",
        ", ".join(versions),
        f"Missing: {', '.join(needed)}; install kvchat again." if needed else "",
    )


def _has(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _terminal() -> Iterator[Finding]:
    size = shutil.get_terminal_size()
    kind = os.environ.get("TERM", "")
    if not sys.stdout.isatty():
        yield Finding("terminal", "standard output is not a terminal")
        return
    encoding = (sys.stdout.encoding or "").lower()
    advice = "" if encoding.startswith("utf") else "Set a UTF-8 locale, for example LANG=C.UTF-8."
    yield Finding("terminal", f"{kind} {size.columns}x{size.lines} {encoding}", advice)


def _devices() -> Iterator[Finding]:
    import torch

    from kvchat.model.device import free_bytes
    from kvchat_kernels.launch import kernel_refusal

    cpu = torch.device("cpu")
    threads = torch.get_num_threads()
    yield Finding("CPU", f"{threads} threads, {format_bytes(free_bytes(cpu))} free")
    yield _compiled_kernels()
    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch can use")
        return
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    yield Finding("GPU", f"{name}, {format_bytes(free_bytes(device))} free")
    refusal = kernel_refusal(device)
    slow = "Models run slowly there, by torch. Triton needs a C compiler and Python's headers."
    yield Finding("GPU kernels", refusal or "Triton compiles them", slow if refusal else "")


def _compiled_kernels() -> Finding:
    """Report the processor that kernels are compiled for: this one, or an older level."""
    origin = f" ({CPU_VARIABLE})" if os.environ.get(CPU_VARIABLE) else ""
    try:
        from kvchat_kernels.cpu.code import processor_name

        return Finding("CPU kernels", f"compiled for {processor_name()}{origin}")
    except ImportError:
        return Finding("CPU kernels", "llvmlite is missing", "Install kvchat again.")
    except RuntimeError as error:
        return Finding("CPU kernels", f"{error}", f"Unset {CPU_VARIABLE}." if origin else "")


def _directories() -> Iterator[Finding]:
    paths = user_paths()
    for subject, path in (("state", paths.state), ("cache", paths.cache)):
        try:
            yield _directory(subject, path)
        except OSError as error:
            yield Finding(subject, f"{path}: {error.strerror}", _disk_advice(error))
        except StoreError as error:
            yield Finding(subject, error.message, error.hint or "See above.")


def _directory(subject: str, path: Path) -> Finding:
    """Check that a directory of kvchat is writable."""
    private_directory(path)
    with tempfile.NamedTemporaryFile(dir=path, buffering=0) as file:
        file.write(b"x")
    space = shutil.disk_usage(path).free
    advice = "Free some disk space." if space < _LOW_SPACE_BYTES else ""
    return Finding(subject, f"{path}, {format_bytes(space)} free", advice)


def _log_file() -> Iterator[Finding]:
    """Report the path of the log file."""
    path = user_paths().state / LOG_NAME
    yield Finding("log", f"{path}" if path.exists() else f"{path} (nothing went wrong so far)")


def _kv() -> Iterator[Finding]:
    """Report the KV on disk, and whether more can be written."""
    settings = settings_of({})
    status = store_admin(settings).status()
    directory = status.directory
    existing = nearest_existing(directory)
    advice = ""
    if status.trouble:
        advice = f"{status.trouble} `kvchat cache verify` drops what is damaged."
    elif not os.access(existing, os.W_OK | os.X_OK):
        advice = "It cannot be written to: choose another with --cache-dir."
    dtype = f", KV in {settings['kv_dtype']}" if settings["kv_dtype"] != "auto" else ""
    yield Finding("KV", f"{used_of_limit(status)} in {directory}{dtype}", advice)


def _shared() -> Iterator[Finding]:
    """Report the shared cache and the machine that prefills, where there are."""
    settings = settings_of({})
    if (config := shared_config(settings, os.environ)) is not None:
        yield _store(config)
        if config.prefill_at:
            yield _box(config)


def _store(config: SharedConfig) -> Finding:
    """Try whether records can be written to a shared cache and read, and how far it is."""
    from kvchat.cache.shared.opening import try_store
    from kvchat.cache.shared.store import StoreTrouble

    subject, place = "shared cache", without_password(config.url)
    try:
        seconds = try_store(config)
    except StoreTrouble as trouble:
        advice = "Start it, or allow it more time by --shared-deadline."
        return Finding(subject, f"{place}: {trouble}", advice)
    sealed = "encrypted" if config.encrypts else "not encrypted"
    return Finding(subject, f"{place}: {1e3 * seconds:.1f} ms a round trip, {sealed}")


def _box(config: SharedConfig) -> Finding:
    """Ask the machine that prefills what it computes."""
    from kvchat.cache.shared.prefill_box import PrefillBox
    from kvchat.cache.shared.store import StoreTrouble

    subject, place = "prefill at", without_password(config.prefill_at)
    try:
        offer = PrefillBox(config.prefill_at, config.secret).offer()
    except StoreTrouble as trouble:
        advice = "`kvchat serve --role prefill` has to run there, with the same key."
        return Finding(subject, f"{place}: {trouble}", advice)
    rate = f", {offer.tokens_per_s:,.0f} tokens/s" if offer.tokens_per_s else ""
    words = ", ".join(f"{name} {value}" for name, value in offer.form.items())
    return Finding(subject, f"{place}: {words}{rate}")


def _demo() -> Iterator[Finding]:
    from kvchat.model.checkpoint.source import find_model

    directory: Path = find_model("demo").directory
    yield Finding("demo model", str(directory))
