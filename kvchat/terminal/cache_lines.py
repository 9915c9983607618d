"""Formats the status of KV on disk and in host memory as lines, for command line and chat."""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.cells import cell_len

from kvchat.core.parameters import FEWER_BITS
from kvchat.core.stats import ModelDirStatus, StoredPack, StoreStatus, TierStatus, Verified
from kvchat.core.text import format_bytes, one_line
from kvchat.core.types import CONVERTED_FROM
from kvchat.terminal.status import plural
from kvchat.terminal.theme import Glyphs
from kvchat.terminal.wrap import one_row

_IDENTITY_CHARS = 8
_PATH_CHARS = 4096
_LABEL_CHARS = 64
FIELD_COLUMNS = 8  # "engine: ", in the lines of /stats
_LEAST_NAME_CELLS = 8


def status_lines(status: StoreStatus, titles: Mapping[str, str]) -> list[str]:
    """Return lines on the store's directory, size, last use and problems.

    `titles` are those of conversations by their ids, which pins have as labels.
    """
    lines = [
        one_line(str(status.directory), _PATH_CHARS),
        f"{used_of_limit(status)}: {_packs(status)}",
        *(f"  {_model_dir(model_dir, status.model_dirs)}" for model_dir in status.model_dirs),
        *pin_lines(status, titles),
    ]
    if status.weights_bytes:
        lines.append(f"packed weights: {format_bytes(status.weights_bytes)} more")
    if status.kernels_bytes:
        lines.append(f"compiled kernels: {format_bytes(status.kernels_bytes)} more")
    if not status.limit_bytes:
        why = one_line(status.why_nothing, _PATH_CHARS)
        lines.append(why or "Chats keep nothing here: --disk-cache is 0.")
    if status.strangers:
        lines.append(_left_alone(status.strangers))
    return [*lines, one_line(status.trouble, _PATH_CHARS)] if status.trouble else lines


def _left_alone(strangers: Sequence[Path]) -> str:
    more = f" and {len(strangers) - 1:,} more" if strangers[1:] else ""
    return f"Not made by this kvchat, and left alone: {strangers[0].name}{more}."


def unkept_lines(status: StoreStatus, files: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return a line per pin whose files are known, but of whose KV nothing is on disk."""
    kept = {pin.label for model_dir in status.model_dirs for pin in model_dir.pins}
    return [
        f"{one_line(label, _LABEL_CHARS)}: {plural(len(paths), 'file')}, "
        "without KV on disk: it can be attached, and is read again"
        for label, paths in files.items()
        if label not in kept
    ]


def pin_lines(status: StoreStatus, titles: Mapping[str, str]) -> list[str]:
    """Return a line per pin; `titles` as in `status_lines`."""
    pins = [pin for model_dir in status.model_dirs for pin in model_dir.pins]
    return [
        f"pinned: {one_line(titles.get(pin.label, pin.label), _LABEL_CHARS)}, "
        f"{plural(pin.num_tokens, 'token')}, since {_when(pin.made_s)}"
        + (f", until {_when(pin.until_s)}" if pin.until_s < math.inf else "")
        for pin in pins
    ]


def tree_lines(
    trees: Sequence[tuple[ModelDirStatus, list[StoredPack]]],
    glyphs: Glyphs,
    width: int | None = None,
) -> list[str]:
    """Return a line per pack, below the one it continues; only branches are indented.

    Names of conversations are cut to what `width` cells have room for; None for any.
    """
    if not trees:
        return ["Nothing is kept."]
    model_dirs = [model_dir for model_dir, _ in trees]
    return [
        line
        for model_dir, packs in trees
        for line in (_model_dir(model_dir, model_dirs), *branch_lines(packs, glyphs, width))
    ]


def branch_lines(
    packs: list[StoredPack], glyphs: Glyphs, width: int | None = None
) -> Iterator[str]:
    """Yield a line per pack of one model directory; `width` as in `tree_lines`."""
    children: dict[int | None, list[int]] = {}
    for number, pack in enumerate(packs):
        children.setdefault(pack.parent, []).append(number)
    # What stands before the children of each pack; a pack comes after the one it continues.
    leads: dict[int | None, str] = {None: ""}
    for number, pack in enumerate(packs):
        lead, siblings = leads[pack.parent], children[pack.parent]
        own, below = lead, lead
        if len(siblings) > 1 and number == siblings[-1]:
            own, below = lead + glyphs.last_branch, lead + " " * len(glyphs.trunk)
        elif len(siblings) > 1:
            own, below = lead + glyphs.branch, lead + glyphs.trunk
        leads[number] = below
        lost = ", its beginning is gone" if pack.is_orphan else ""
        pinned = ", pinned" if pack.is_pinned else ""
        size = f"{plural(pack.num_tokens, 'token')}, {format_bytes(pack.num_bytes)}"
        line = f"  {own}{size}, {_when(pack.last_used_s)}"
        if width is not None and cell_len(f"{line}{pinned}{lost}") > width:
            line = f"  {own}{size}"
        room = None if width is None else width - cell_len(f"{line}{pinned}{lost}")
        yield f"{line}{_names(pack, room)}{pinned}{lost}"


def _names(pack: StoredPack, room: int | None) -> str:
    """Return the conversation that a pack belongs to, and how many others, in so many cells."""
    if not pack.names:
        return ""
    more = f" and {len(pack.names) - 1:,} more" if pack.names[1:] else ""
    cells = _LABEL_CHARS if room is None else min(_LABEL_CHARS, room - cell_len(f", {more}"))
    return f", {one_row(pack.names[0], cells)}{more}" if cells >= _LEAST_NAME_CELLS else ""


def verified_line(found: Verified) -> str:
    """Return the result of verifying the store."""
    if found.is_sound:
        return f"{plural(found.num_sound, 'pack')} read, none is damaged."
    parts = [f"{plural(found.num_sound, 'pack')} sound"]
    if found.num_damaged:
        parts.append(f"{found.num_damaged:,} damaged and gone now")
    if found.num_tables:
        parts.append(f"{plural(found.num_tables, 'damaged table')} gone with all it led to")
    return f"{', '.join(parts)}. Chats read again what they need."


def collected_line(num_bytes: int) -> str:
    """Return a line on the bytes that gc freed."""
    return f"{format_bytes(num_bytes)} freed." if num_bytes else "There was nothing to free."


def clearing_question(status: StoreStatus) -> str:
    """Return the question before everything is deleted."""
    size = format_bytes(status.num_bytes)
    if status.weights_bytes:
        size += f" of KV and {format_bytes(status.weights_bytes)} of packed weights"
    else:
        size += " of KV"
    directory = one_line(str(status.directory), _PATH_CHARS)
    return f"Delete {size} in {directory}? No word of a conversation is lost."


def cleared_line(num_bytes: int) -> str:
    """Return a line on the bytes that clearing deleted."""
    return f"{format_bytes(num_bytes)} deleted." if num_bytes else "There was nothing to delete."


def tier_lines(tier: TierStatus) -> list[str]:
    """Return the content and totals of one of the chat's slower tiers, for /stats."""
    name = f"{one_line(f'{tier.name}:', _LABEL_CHARS)} ".ljust(FIELD_COLUMNS)
    if tier.trouble and not tier.limit_bytes:  # it could not be opened
        return [f"{name}{one_line(tier.trouble, _PATH_CHARS)}"]
    if tier.name.startswith(CONVERTED_FROM):
        line = f"{name}{format_bytes(tier.bytes_read)} read, and converted to this chat's KV"
        return [line] if tier.bytes_read else []
    limit = f" of {format_bytes(tier.limit_bytes)}" if tier.limit_bytes else ""
    moved = f"{format_bytes(tier.bytes_read)} read, {format_bytes(tier.bytes_written)} written"
    if not (tier.is_shared or tier.num_packs or limit):  # only the store itself knows what it holds
        return [f"{name}{moved}"]
    lines = [
        f"{name}{plural(tier.num_packs, 'pack')} of this model; "
        f"{format_bytes(tier.num_bytes)}{limit} used{' by all' if tier.is_shared else ''}; "
        f"{moved}"
    ]
    if tier.num_quarantined:
        blocks = plural(tier.num_quarantined, "block")
        lines.append(
            f"        {blocks} of another model found by the first forward pass, and deleted"
        )
    return [*lines, f"        {one_line(tier.trouble, _PATH_CHARS)}"] if tier.trouble else lines


def used_of_limit(status: StoreStatus) -> str:
    """Return how full a store is."""
    limit = f" of {format_bytes(status.limit_bytes)}" if status.limit_bytes else ""
    return f"{format_bytes(status.num_bytes)}{_uncoded(status)}{limit} used"


def _uncoded(status: StoreStatus | ModelDirStatus) -> str:
    """Return what KV would take without its code of fewer bytes; "" where it has none."""
    if not status.saved_bytes:
        return ""
    return f" ({format_bytes(status.num_bytes + status.saved_bytes)} uncoded)"


def _packs(status: StoreStatus) -> str:
    if not status.num_packs:
        return "nothing is kept"
    return f"{plural(status.num_packs, 'pack')}, {plural(status.num_tokens, 'token')}"


def _model_dir(model_dir: ModelDirStatus, model_dirs: Sequence[ModelDirStatus]) -> str:
    """Return a line on one of a store's model directories."""
    size = f"{plural(model_dir.num_packs, 'pack')}, {plural(model_dir.num_tokens, 'token')}"
    size_on_disk = f"{format_bytes(model_dir.num_bytes)}{_uncoded(model_dir)}"
    used = f"{size_on_disk}, last used {_when(model_dir.last_used_s)}"
    name = model_dir.model
    if name.startswith("/"):  # a file: its directory takes a row of its own, and tells little
        name = name.rstrip("/").rpartition("/")[2]
    model = one_line(name, _LABEL_CHARS) or "a model not known here"
    kv = f", KV in {one_line(model_dir.kv_dtype, _LABEL_CHARS)}" if model_dir.kv_dtype else ""
    others = [other for other in model_dirs if other.model == model_dir.model]
    run = _run_beside(model_dir, others) if model_dir.model else ""
    return f"{model}{run}{kv}: {size}, {used} ({model_dir.identity[:_IDENTITY_CHARS]})"


def _run_beside(model_dir: ModelDirStatus, others: Sequence[ModelDirStatus]) -> str:
    """Return how a model was run, as far as that tells it from others of its name."""
    blocks = f"blocks of {plural(model_dir.block_size, 'token')}" if model_dir.block_size else ""
    weights = f"weights in {model_dir.weights}" if model_dir.weights in FEWER_BITS else ""
    facts: list[tuple[str, set[str] | set[int]]] = [
        (model_dir.dtype, {other.dtype for other in others}),
        (weights, {other.weights for other in others}),
        (blocks, {other.block_size for other in others}),
    ]
    told = [one_line(fact, _LABEL_CHARS) for fact, values in facts if fact and len(values) > 1]
    return "".join(f", {fact}" for fact in told)


def _when(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M}" if time_s else "at an unknown time"
