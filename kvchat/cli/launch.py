"""`kvchat launch CLIENT`: starts an agent or another client on a server of this machine."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.cli.agents import CLIENTS, Client, Launch
from kvchat.cli.background import ServerFacts, client_path, facts_of, num_computed, started
from kvchat.cli.build import settings_of, store_admin, user_paths
from kvchat.cli.lines import say
from kvchat.cli.model_names import whole_name
from kvchat.cli.settings import Settings
from kvchat.core.errors import ContextTooLong, KvchatError, StoreError, UsageError
from kvchat.core.paths import (
    private_directory,
    read_state,
    replace_private,
    require_working_directory,
    write_state,
)
from kvchat.core.stats import num_like_first
from kvchat.core.text import one_line
from kvchat.terminal.status import format_seconds

if TYPE_CHECKING:
    from kvchat.core.stats import ReadRates

_MINUTES, _PATIENCE_S = 10.0, 5.0
_READ, _VERSION = "read.json", 1  # when a client's own prompt was read, by model
_GREETING = "Say hello."


def launch(name: str, arguments: Sequence[str], flags: dict[str, Any], is_warmed: bool) -> int:
    """Start a client that uses the model, and return its exit code.

    With `is_warmed` the client answers one prompt before: what it sends at the beginning of every
    chat is cached then. Raises UsageError for an unknown client or one that is not installed,
    ContextTooLong for a model whose context its own prompt fills.
    """
    require_working_directory()
    if name not in CLIENTS:
        raise UsageError(f"{one_line(name, 32)} is no client known here.", f"There are {_names()}.")
    client = CLIENTS[name]
    if shutil.which(client.program) is None:
        raise UsageError(f"{client.title} is not installed.", f"`{client.install}` installs it.")
    settings = settings_of(flags)
    settings = settings.with_model(whole_name(settings, settings["model"]))
    if settings["incognito"]:
        raise UsageError("A server in the background leaves its address: no --incognito here.")
    minutes = settings["keep_alive"] or _MINUTES
    running = started(settings, minutes, say, needs_port=True)
    server, own_name = facts_of(running), f"{name}-{os.getpid()}"
    _require_room(client, server)
    directory = user_paths().state / "clients" / name
    own_url = f"{server.url}{client_path(own_name)}"
    how = client.launch(replace(server, url=own_url), directory)
    _write(directory, how)
    environment = {**os.environ, **how.variables}
    if is_warmed:
        say(f"{client.title} reads its own prompt of about {client.num_fixed:,} tokens once")
        command = [client.program, *how.arguments, *client.asking, _GREETING]
        warming = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
        if warming.returncode == 0:
            _note_read(directory, server)
    say(f"{client.title} on {server.model}, {server.context:,} tokens of context")
    if client.num_fixed:
        say(_price(client, _rates(server), _has_read(settings, directory, server)))
    code = _run([client.program, *how.arguments, *arguments], environment)
    if num_computed(running, own_name) >= client.num_fixed > 0:
        _note_read(directory, server)
    return code


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Run a client to its end; Ctrl-C is the client's: it may go on."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def _price(client: Client, rates: "ReadRates | None", is_cached: bool) -> str:
    """Return what the client's own prompt costs now and later, where this machine knows."""
    prompt = f"its own prompt of about {client.num_fixed:,} tokens"
    if rates is None or rates.computed is None:
        once, later = "", ""
    else:
        alike = num_like_first(0, client.num_fixed, rates.half_context)
        cold, warm = alike / rates.computed, client.num_fixed / rates.from_disk
        once = f", in about {format_seconds(cold)}"
        later = f", in {format_seconds(warm)}" if warm else ", at once"
    if is_cached:
        return f"{prompt} comes from the cache{later}"
    return f"{prompt} is read once{once}, and comes from the cache later{later}"


def _has_read(settings: Settings, directory: Path, server: ServerFacts) -> bool:
    """Whether the client's own prompt was read since KV was cleared."""
    read_s = read_state(directory / _READ, _VERSION, "models").get(server.model, 0.0)
    return isinstance(read_s, float) and read_s > store_admin(settings).cleared_s()


def _note_read(directory: Path, server: ServerFacts) -> None:
    before = read_state(directory / _READ, _VERSION, "models")
    write_state(directory / _READ, _VERSION, "models", {**before, server.model: time.time()})


def _rates(server: ServerFacts) -> "ReadRates | None":
    """Return the rates at which a server reads, None if it does not say."""
    from kvchat.remote.address import address_of
    from kvchat.remote.local_client import LocalClient
    from kvchat.remote.server_kv import ServerKv

    async def ask() -> "ReadRates":
        http = LocalClient(address_of(server.url, server.key))
        try:
            [place] = await ServerKv(http, _PATIENCE_S).locate([[0]])
            return place.rates
        finally:
            await http.close()

    try:
        return asyncio.run(ask())
    except KvchatError:
        return None


def _names() -> str:
    return ", ".join(CLIENTS)


def _require_room(client: Client, server: ServerFacts) -> None:
    if server.context <= client.num_fixed:
        raise ContextTooLong(
            f"{client.title} sends about {client.num_fixed:,} tokens before your first word, and "
            f"the context of {server.model} holds {server.context:,}.",
            "Choose a model with a longer context by -m, or raise --max-context.",
            client.num_fixed,
            server.context,
        )


def _write(directory: Path, how: Launch) -> None:
    """Write the client's files; raises StoreError."""
    private_directory(directory)
    for name, text in (how.files or {}).items():
        try:
            replace_private(directory / name, text.encode())
        except OSError as error:
            raise StoreError(f"{directory / name} cannot be written: {error.strerror}.") from error
