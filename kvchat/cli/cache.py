"""`kvchat cache`: shows, verifies, copies and deletes KV on disk, without loading a model."""

import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvchat.chat.saved_chats import named_contexts, titles
from kvchat.chat.why import Times, dated, missing
from kvchat.cli.build import context_copier, session_store, store_admin
from kvchat.cli.lines import confirm, print_line
from kvchat.cli.settings import Settings
from kvchat.core.errors import ExitCode, SessionNotFound, UsageError
from kvchat.core.stats import StoreStatus
from kvchat.core.text import format_bytes, one_line
from kvchat.core.types import MissReason, TokenIds
from kvchat.terminal import cache_lines, warmth
from kvchat.terminal.theme import ASCII_GLYPHS, Glyphs, is_utf8
from kvchat.terminal.wrap import columns_of, told_rows

if TYPE_CHECKING:
    from kvchat.cache.shared.copying import Copy

_HANGING = 4  # more than the lines of a list are indented


def show_status(settings: Settings, as_json: bool) -> None:
    """Print the store's directory and content."""
    status = store_admin(settings).status()
    if as_json:
        _print([json.dumps(_object(status))])
    else:
        _print(cache_lines.status_lines(status, titles(session_store(settings))))


def show_tree(settings: Settings) -> None:
    """Print one line per pack."""
    glyphs = Glyphs() if is_utf8(sys.stdout.encoding) else ASCII_GLYPHS
    width = columns_of(sys.stdout)
    trees = store_admin(settings).tree(named_contexts(session_store(settings)))
    _print(cache_lines.tree_lines(trees, glyphs, width))


def show_why(settings: Settings, text: str) -> None:
    """Print what the next message of a conversation costs, and why not less; loads no model."""
    kept, store = store_admin(settings), session_store(settings)
    session_id = store.find(text)
    read = store.read(session_id)
    conversation = read.conversation
    ids = conversation.context_ids()
    if not ids:
        raise UsageError("This conversation is empty.")
    [places] = kept.locate([(read.model, ids)])
    cost = places.cost()
    lines = [f"{one_line(conversation.label)}: {warmth.sentence(cost)}"]
    reason = kept.why(read.model, ids)
    if reason is not None:
        [*_, last] = conversation.path()
        reason = dated(reason, last.created_s, Times(cleared_s=kept.cleared_s()))
        if reason is MissReason.NEVER_WRITTEN and store.open_elsewhere([session_id]):
            reason = MissReason.OPEN_ELSEWHERE
        lines.append(missing(cost.num_read, reason))
    _print(lines)


def verify(settings: Settings) -> ExitCode:
    """Read every pack and print how many are sound or damaged; return the exit code."""
    found = store_admin(settings).verify()
    _print([cache_lines.verified_line(found)])
    return ExitCode.OK if found.is_sound else ExitCode.GENERATION


def collect(settings: Settings) -> None:
    """Remove what is out of date or over the limit, and print the bytes freed."""
    _print([cache_lines.collected_line(store_admin(settings).gc())])


def clear(settings: Settings, is_sure: bool) -> None:
    """Delete everything and print the bytes freed; ask first unless `is_sure`."""
    kept = store_admin(settings)
    if not is_sure and not confirm(cache_lines.clearing_question(kept.status())):
        _print(["Nothing is deleted."])
        return
    _print([cache_lines.cleared_line(kept.clear())])


def show_path(settings: Settings) -> None:
    """Print the store's directory, which may not exist yet."""
    _print([str(store_admin(settings).directory)])


def _object(status: StoreStatus) -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "directory": str(status.directory),
        "used_bytes": status.num_bytes,
        "uncoded_bytes": status.num_bytes + status.saved_bytes,
        "limit_bytes": status.limit_bytes,
        "packed_weights_bytes": status.weights_bytes,
        "compiled_kernels_bytes": status.kernels_bytes,
        "packs": status.num_packs,
        "tokens": status.num_tokens,
        "trouble": status.trouble or None,
        "pins": [
            {
                "label": pin.label,
                "tokens": pin.num_tokens,
                "made": pin.made_s,
                "until": pin.until_s if pin.until_s < math.inf else None,
            }
            for model_dir in status.model_dirs
            for pin in model_dir.pins
        ],
        "generations": [
            {
                "identity": model_dir.identity,
                "model": model_dir.model or None,
                "kv_dtype": model_dir.kv_dtype or None,
                "dtype": model_dir.dtype or None,
                "weights": model_dir.weights or None,
                "block_size": model_dir.block_size or None,
                "packs": model_dir.num_packs,
                "tokens": model_dir.num_tokens,
                "bytes": model_dir.num_bytes,
                "uncoded_bytes": model_dir.num_bytes + model_dir.saved_bytes,
                "last_used": model_dir.last_used_s,
                "trouble": model_dir.trouble or None,
            }
            for model_dir in status.model_dirs
        ],
    }


def _print(lines: list[str]) -> None:
    sys.stdout.write(told_rows("\n".join(lines), sys.stdout, _HANGING) + "\n")


# KV to the shared cache and back


def push(settings: Settings, text: str) -> None:
    """Copy the KV of a pin or a conversation to the shared cache, and say what it weighs."""
    name, ids, _ = _context(settings, text)
    _print_end(context_copier(settings).push(name, ids, _teller()), "to the shared cache")


def pull(settings: Settings, text: str, only_price: bool) -> None:
    """Copy the KV of a pin or a conversation from the shared cache, or only say what it weighs."""
    name, ids, model = _context(settings, text)
    goes_on = _print_price if only_price else _teller()
    copied = context_copier(settings).pull(name, ids, model, goes_on)
    if not only_price or copied.num_there == copied.num_tokens:
        _print_end(copied, "to the disk")


def _context(settings: Settings, text: str) -> tuple[str, TokenIds | None, str]:
    """Return a context's name, its token ids and its model; no ids for what is no conversation."""
    store = session_store(settings)
    try:
        session_id = store.find(text)
    except SessionNotFound:
        return text, None, ""
    read = store.read(session_id)
    return session_id, read.conversation.context_ids(), read.model


def _teller() -> "Callable[[Copy], bool]":
    """Return what says on a terminal how much is left, once a pack."""

    def tell(copy: "Copy") -> bool:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{_price(copy)} left")
            sys.stderr.flush()
        return True

    return tell


def _print_price(copy: "Copy") -> bool:
    print_line(f"{copy.num_tokens:,} tokens, {_price(copy)} to copy; {copy.num_there:,} are there.")
    return False


def _price(copy: "Copy") -> str:
    seconds = f", {copy.seconds:.1f} s" if copy.seconds is not None else ""
    return f"{format_bytes(copy.num_bytes)}{seconds}"


def _print_end(copy: "Copy", where: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if not copy.num_bytes:
        print_line(f"All {copy.num_there:,} tokens are there already.")
        return
    print_line(f"{copy.num_there:,} tokens are there; {_price(copy)} went {where}.")
