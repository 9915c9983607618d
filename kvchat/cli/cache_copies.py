"""`kvchat cache push` and `pull`: KV to the shared cache and back, without loading a model."""

import sys
from collections.abc import Callable

from kvchat.cache.shared.copying import Copy
from kvchat.cli.build import context_copier, session_store
from kvchat.cli.lines import print_line
from kvchat.cli.settings import Settings
from kvchat.core.errors import SessionNotFound
from kvchat.core.text import format_bytes
from kvchat.core.types import TokenIds


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


def _teller() -> Callable[[Copy], bool]:
    """Return what says on a terminal how much is left, once a pack."""

    def tell(copy: Copy) -> bool:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{_price(copy)} left")
            sys.stderr.flush()
        return True

    return tell


def _print_price(copy: Copy) -> bool:
    print_line(f"{copy.num_tokens:,} tokens, {_price(copy)} to copy; {copy.num_there:,} are there.")
    return False


def _price(copy: Copy) -> str:
    seconds = f", {copy.seconds:.1f} s" if copy.seconds is not None else ""
    return f"{format_bytes(copy.num_bytes)}{seconds}"


def _print_end(copy: Copy, where: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if not copy.num_bytes:
        print_line(f"All {copy.num_there:,} tokens are there already.")
        return
    print_line(f"{copy.num_there:,} tokens are there; {_price(copy)} went {where}.")
