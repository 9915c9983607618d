"""`kvchat pull org/name[:QUANT]`: downloads a model, and helps to choose among its formats."""

import sys
from collections.abc import Mapping

from kvchat.cli.lines import print_line, say
from kvchat.core.errors import UsageError
from kvchat.core.text import format_bytes, one_line
from kvchat.model.checkpoint.pulling import (
    fetch,
    remote_model,
    require_room,
    split_name,
)

# Memory that a model takes for each byte of its files where its geometry is not known.
_ROOM = 1.15


def pull(name: str) -> None:
    """Download a model and say how it is started.

    With several formats the user chooses at a terminal; elsewhere UsageError names them. Raises
    UsageError, ModelError and StoreError, each with one sentence.
    """
    place, quant = split_name(name)
    model = remote_model(place)
    formats = model.formats
    if quant is None and len(formats) > 1:
        quant = _chosen(place, formats)
    elif quant is None and formats:
        quant = next(iter(formats))
    files = model.files_of(quant)
    whole = place if quant is None else f"{place}:{quant}"
    left = require_room(model, files)
    total = format_bytes(sum(file.num_bytes for file in files))
    say(f"{one_line(whole, 100)}: {total}, {format_bytes(left)} to come")
    fetch(model, files, say)
    print_line(f"{whole} is here. Chat with it: kvchat -m {whole}")


def _chosen(place: str, formats: Mapping[str, int]) -> str:
    """Let the user choose a format; those that run here are marked."""
    verdicts = _verdicts(place, formats)
    for number, (name, size) in enumerate(formats.items(), start=1):
        say(f"{number:>3}  {name:12} {format_bytes(size):>9}  {verdicts[name]}".rstrip())
    if sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        raise UsageError(
            f"{place} has several formats: {', '.join(formats)}.",
            f"Choose one: kvchat pull {place}:{next(iter(formats))}",
        )
    best = next((n for n in reversed(list(formats)) if verdicts[n] == "well"), None) or next(
        (name for name in reversed(list(formats)) if verdicts[name] != "no room"),
        next(iter(formats)),
    )
    sys.stderr.write(f"Which one, by number or name? [{best}] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise UsageError("No format was chosen.")
    text = answer.strip()
    if text.isdigit() and 1 <= int(text) <= len(formats):
        return list(formats)[int(text) - 1]
    for name in formats:
        if name.lower() == (text or best).lower():
            return name
    raise UsageError(f"{one_line(text, 40)} is none of them.")


def _verdicts(place: str, formats: Mapping[str, int]) -> dict[str, str]:
    """Return how each format would run here, as `kvchat models fit` has it; "fits" where only the
    size is known.
    """
    from kvchat.bench.probe import known_speed
    from kvchat.cli.build import state_memory
    from kvchat.cli.sizing import fit_of
    from kvchat.core.config import ModelConfig
    from kvchat.engine.sizing import Q4_BYTES, known_models, with_weights_of
    from kvchat.model.device import choose_device, free_bytes

    device, memory = choose_device(ModelConfig()), state_memory()
    free, speed = free_bytes(device), known_speed(memory, device)
    known = next((m for m in known_models() if m.command.startswith(f"kvchat -m {place}:")), None)
    verdicts = {}
    for name, num_bytes in formats.items():
        if known is not None and speed is not None:
            per_weight = Q4_BYTES * num_bytes / known.weight_bytes
            verdicts[name] = fit_of(with_weights_of(known, per_weight), speed, free).verdict
        else:
            verdicts[name] = "fits" if _ROOM * num_bytes < free else "no room"
    return verdicts
