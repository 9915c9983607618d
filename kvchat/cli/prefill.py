"""`kvchat prefill`: reads files or a conversation here, so that other machines need not."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as TookTooLong
from typing import TYPE_CHECKING, Any

from kvchat.cli.build import open_host, session_store, settings_of
from kvchat.cli.model_names import whole_name
from kvchat.cli.settings import Settings
from kvchat.core.errors import ContextTooLong, GenerationError, UsageError
from kvchat.core.paths import require_working_directory, user_path
from kvchat.core.text import format_bytes

if TYPE_CHECKING:
    from kvchat.chat.chat_model import ChatModel
    from kvchat.chat.host import ChatHost

# Writing what was read to a store on a slow line.
_WRITING_PATIENCE_S = 600.0


def run_prefill(flags: dict[str, Any], names: Sequence[str]) -> None:
    """Read the beginning of chats with these files, or one conversation; share its KV.

    Raises UsageError without a shared cache, and where the names are neither.
    """
    require_working_directory()
    settings = settings_of(flags)
    if not settings["shared_cache"] or settings["incognito"]:
        raise UsageError("There is no shared cache to read for.", "--shared-cache names one.")
    settings = Settings({**settings.values, "prefill_at": None}, settings.origins)  # here
    settings = settings.with_model(whole_name(settings, settings["model"]))
    host = open_host(settings, attaches=False)
    try:
        ids = _context(settings, host.model, names)
        limit = host.wait_until_ready().context_limit
        if len(ids) >= limit:
            raise ContextTooLong(
                f"This has {len(ids):,} tokens, and the context holds {limit:,}.",
                "Give less of it.",
                len(ids),
                limit,
            )
        _read_and_share(host, ids)
    finally:
        host.close()


def _context(settings: Settings, model: "ChatModel", names: Sequence[str]) -> list[int]:
    """Return the token ids of a conversation, or those with which chats with the files begin."""
    from kvchat.chat.attachment import read_attachment
    from kvchat.chat.conversation import Conversation

    paths = [user_path(name) for name in names]
    if len(names) == 1 and not paths[0].exists():
        store = session_store(settings)
        read = store.read(store.find(names[0]))
        if read.model != model.name:
            raise UsageError(
                f"This conversation was with {read.model}, not with {model.name}.", "Give it by -m."
            )
        return list(read.conversation.context_ids())
    text = "".join(f"{read_attachment(path).text}\n" for path in paths)
    return model.opening_ids(Conversation("", time.time(), settings.system), text)


def _read_and_share(host: "ChatHost", ids: list[int]) -> None:
    began_s = time.perf_counter()
    try:
        host.read(ids).result()
        read_s = time.perf_counter() - began_s
        num_tokens = host.share(ids).result(_WRITING_PATIENCE_S)
    except (TookTooLong, CancelledError):
        raise GenerationError("The shared cache took too long.") from None
    status = host.status().result()
    trouble = next((tier.trouble for tier in status.tiers if tier.name == "shared"), "")
    if not num_tokens:
        raise GenerationError(f"The shared cache took nothing: {trouble or 'it is too short.'}")
    num_bytes = num_tokens * status.block_bytes // status.block_size
    sys.stdout.write(
        f"{num_tokens:,} of {len(ids):,} tokens, {format_bytes(num_bytes)}, are in the shared "
        f"cache; read in {read_s:.1f} s.\n"
    )
