"""Creates directories, stores, the chat model, the engine and the host from the settings.

torch is imported only on the engine's thread.
"""

import os
import threading
from collections.abc import Callable, Container, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvchat.cli.made_at_use import made_at_use
from kvchat.cli.settings import NO_ENDPOINT, Settings, resolve
from kvchat.cli.shared_cache import shared_config
from kvchat.core.config import Paths
from kvchat.core.errors import ModelError, UsageError
from kvchat.core.events import LoadEvent, LoadProgress, ModelReady
from kvchat.core.parameters import OF_ANSWERS
from kvchat.core.paths import is_gone, user_path
from kvchat.core.types import NO_MEMORY
from kvchat_kernels.cpu.object_cache import save_nothing

if TYPE_CHECKING:
    from kvchat.cache.disk.admin import StoreAdmin
    from kvchat.cache.disk.memory import DiskMemory
    from kvchat.cache.shared.copying import ContextCopier
    from kvchat.cache.shared.tier import SharedTier
    from kvchat.cache.tier import Layout
    from kvchat.chat.answer_settings import AskOptions
    from kvchat.chat.chat_model import ChatModel
    from kvchat.chat.deletion import SavedPlaces
    from kvchat.chat.host import ChatHost
    from kvchat.chat.store import SessionStore
    from kvchat.chat.template_process import RenderingChild
    from kvchat.core.types import Memory
    from kvchat.engine.engine import Engine
    from kvchat.model.checkpoint.source import ModelSource
    from kvchat.tools.toolbox import Toolbox


def user_paths() -> Paths:
    """Return the platform's directories for this user's config, sessions, state and cache."""
    import platformdirs

    directories = platformdirs.PlatformDirs("kvchat", appauthor=False)
    return Paths(
        config=directories.user_config_path / "config.toml",
        sessions=directories.user_data_path / "sessions",
        state=directories.user_state_path,
        cache=directories.user_cache_path,
    )


def settings_of(flags: Mapping[str, Any]) -> Settings:
    """Return the settings of a command with these flags, None for those not given."""
    return resolve(flags, os.environ, user_paths().config)


def state_memory() -> "DiskMemory":
    """Return the memory of what kvchat has found out about models and this machine."""
    from kvchat.cache.disk.memory import DiskMemory

    return DiskMemory(user_paths().state)


def memory_of(settings: Settings) -> "Memory":
    """Return the memory of a chat, which an incognito one has not."""
    return NO_MEMORY if settings["incognito"] else made_at_use(state_memory)


def session_store(settings: Settings) -> "SessionStore":
    """Return the store of saved conversations."""
    from kvchat.chat.store import SessionStore

    directory = settings["sessions_dir"]
    return SessionStore(user_path(directory) if directory else user_paths().sessions)


def cache_directory(settings: Settings) -> Path:
    """Return the directory of the KV on disk."""
    directory = settings["cache_dir"]
    return user_path(directory) if directory else user_paths().cache / "kv"


def store_admin(settings: Settings) -> "StoreAdmin":
    """Return the administration of the KV store on disk."""
    return made_at_use(partial(_store_admin, settings))


def _store_admin(settings: Settings) -> "StoreAdmin":
    from kvchat.cache.disk.admin import StoreAdmin
    from kvchat.cache.disk.lookup import KvSettings

    config, model = settings.cache_config(), settings.model_config()
    wanted = KvSettings(config.block_size, config.kv_dtype, model.dtype, model.weights)
    memory, open_shared = memory_of(settings), shared_opener(settings)
    return StoreAdmin(cache_directory(settings), config.disk_bytes, memory, wanted, open_shared)


def shared_opener(settings: Settings) -> "Callable[[Layout], SharedTier] | None":
    """Return what opens the shared tier of a layout; None where no shared cache is named.

    A list of conversations needs no key: only opening raises UsageError where there is none.
    """
    if not settings["shared_cache"] or settings["incognito"]:
        return None

    def open_shared(layout: "Layout") -> "SharedTier":
        from kvchat.cache.shared.opening import open_tier

        config = shared_config(settings, os.environ)
        assert config is not None
        return open_tier(config, layout, memory_of(settings))

    return open_shared


def context_copier(settings: Settings) -> "ContextCopier":
    """Return what copies contexts to the shared cache and back; UsageError where none is named."""
    from kvchat.cache.disk.quota import disk_budget
    from kvchat.cache.shared.copying import ContextCopier

    open_shared = shared_opener(settings)
    if open_shared is None:
        raise UsageError("There is no shared cache.", "--shared-cache names one.")
    shared_config(settings, os.environ)  # raises before anything is looked for
    directory = cache_directory(settings)
    limit = disk_budget(settings.cache_config().disk_bytes, directory)
    return ContextCopier(directory, limit, memory_of(settings), open_shared)


def saved_places(settings: Settings) -> "SavedPlaces":
    """Return every place that has something of saved conversations; none for an incognito chat."""
    from kvchat.chat.deletion import SavedPlaces
    from kvchat.chat.typed_lines import TypedLines
    from kvchat.cli.running_server import drop_in_servers

    if settings["incognito"]:
        return SavedPlaces(None)
    store, typed = session_store(settings), TypedLines(history_path())
    server = partial(drop_in_servers, user_paths().state)
    return SavedPlaces(store, store_admin(settings), typed, answers_path(settings), server)


def answers_path(settings: Settings) -> Path:
    """Return the file of what `kvchat serve` stores."""
    return cache_directory(settings).parent / "answers.db"


def history_path() -> Path:
    """Return the file of what was typed at the prompt."""
    return user_paths().state / "history"


def with_model_of(settings: Settings, model: str, saved: Mapping[str, Any] | None) -> Settings:
    """Return the settings with which a conversation goes on; `Settings.in_conversation` explains.

    A model whose file was moved is looked for. Raises ModelError if it is gone.
    """
    settings = settings.in_conversation(model, saved)
    name = settings["model"]
    is_here = has_endpoint(settings) or settings.names_model or name != model
    if is_here or not is_gone(name):
        return settings
    from kvchat.model.checkpoint.used_models import UsedModels

    if (path := UsedModels(memory_of(settings)).moved_to(name)) is None:
        raise ModelError(
            f"The model of this conversation is not at {name} any more.",
            "Name where it is, or another one: -m FILE",
        )
    return settings.with_model(path)


def ask_options(
    settings: Settings, samples: int = 1, leaves_out: Container[str] = ()
) -> "AskOptions":
    """Return how answers are generated, before a model's own defaults.

    leaves_out   names of settings that keep their own defaults
    """
    from kvchat.chat.answer_settings import AskOptions, with_values

    names = [parameter.name for parameter in OF_ANSWERS if parameter.name not in leaves_out]
    chosen = {name: settings[name] for name in names if settings[name] is not None}
    shares = bool(settings["shared_cache"]) and not settings["incognito"]
    plain = AskOptions(num_samples=samples, chosen=frozenset(), shares_system=shares)
    return with_values(plain, chosen)


def open_toolbox(settings: Settings) -> "Toolbox | None":
    """Return the tools that the settings offer; None for none. MCP servers begin to start.

    Raises UsageError for a bad list of servers. The owner closes the toolbox.
    """
    if not settings["tools"]:
        return None
    from kvchat.tools.local_tools import local_tools
    from kvchat.tools.mcp_tools import McpServers, read_servers
    from kvchat.tools.toolbox import Toolbox

    tools, allowed = local_tools(Path.cwd(), settings["tool_env"]), settings["allow_tool"]
    configs = read_servers(user_paths().config.with_name("mcp.json"))
    return Toolbox(tools, allowed, McpServers(configs) if configs else None)


def open_host(
    settings: Settings,
    on_load: Callable[[LoadEvent], None] | None = None,
    model_name: str | None = None,
    child: "RenderingChild | None" = None,
    attaches: bool = True,
) -> "ChatHost":
    """Find the model, read its text files, and start loading it on the engine's thread.

    `child` is a process for its chat template that was started in advance. With `attaches` a
    `kvchat serve` that runs with these settings takes the place of the model. Raises ModelError if
    the model is not found or its text files are bad; later failures come as load events. A hub
    download happens here and blocks.
    """
    if (host := _remote_host(settings, on_load, model_name, attaches)) is not None:
        return host
    from kvchat.chat.chat_model import read_chat_model
    from kvchat.chat.host import ChatHost
    from kvchat.model.checkpoint.source import find_model

    name = model_name if model_name is not None else settings["model"]
    # An adapter was made for one model, so a model that is switched to gets none.
    source = find_model(name, settings["adapter"] if name == settings["model"] else None)
    store = None if settings["incognito"] else session_store(settings)
    build, ahead = _build(settings, source, _draft(settings, source)), _prefetch_pages(settings)
    model = read_chat_model(source, limit_s=settings["timeout"], child=child)
    return ChatHost(model, build, store, on_load, ahead, settings=settings.of_model(name))


def _remote_host(
    settings: Settings,
    on_load: Callable[[LoadEvent], None] | None,
    model_name: str | None,
    attaches: bool,
) -> "ChatHost | None":
    """Return a host for the server that the settings name, or with `attaches` for one that runs
    here.

    None if the model is to be loaded: no server is named and none runs with these settings, or the
    user goes on with a model that the server does not have.
    """
    if has_endpoint(settings):
        from kvchat.cli.endpoints import endpoint_address, open_remote_host

        is_named = settings.origins.get("model", "default") != "default"
        wanted = model_name or (settings["model"] if is_named else "")
        address = endpoint_address(settings["endpoint"], wanted, user_paths().config)
        store = None if settings["incognito"] else session_store(settings)
        try:
            return open_remote_host(settings, address, store, on_load)
        except ModelError:
            if model_name is None:
                raise
            return None
    if model_name is not None or not attaches or not may_attach(settings):
        return None
    return _attached_host(settings, on_load)


def _attached_host(
    settings: Settings, on_load: Callable[[LoadEvent], None] | None
) -> "ChatHost | None":
    """Return a host for the `kvchat serve` that runs here with these settings, None without one."""
    from kvchat.cli.running_server import running_server

    state = user_paths().state
    if running_server(settings, state) is None:
        return None
    from kvchat.cli.endpoints import open_attached_host

    def load(progress: Callable[[LoadProgress], None]) -> "tuple[Engine, ModelReady]":
        from kvchat.model.checkpoint.source import find_model

        source = find_model(settings["model"], settings["adapter"])
        return _build(settings, source, _draft(settings, source))(progress)

    def read_own() -> "ChatModel":
        from kvchat.chat.chat_model import read_chat_model
        from kvchat.model.checkpoint.source import find_model

        source = find_model(settings["model"], settings["adapter"])
        return read_chat_model(source, limit_s=settings["timeout"])

    try:
        return open_attached_host(
            settings,
            lambda: running_server(settings, state),
            session_store(settings),
            on_load,
            load,
            read_own,
        )
    except ModelError:  # it ends just now, or is another program on the same port
        return None


def _draft(settings: Settings, source: "ModelSource") -> "ModelSource | None":
    """Return the draft model asked for, None for none; raises ModelError if it is not found."""
    from kvchat.model.checkpoint.source import find_model

    name = settings.draft_name(source.name)
    return find_model(name) if name is not None else None


def has_endpoint(settings: Settings) -> bool:
    """Return whether the user names another program's server."""
    return settings["endpoint"] not in (None, NO_ENDPOINT)


def may_attach(settings: Settings) -> bool:
    """Return whether a chat may use a server of this user: it leaves no trace there, and lacks none
    of what it was asked for. A server drops no KV for a chat.
    """
    is_own = settings["endpoint"] is not None or settings["incognito"]
    return not is_own and settings["kv_budget"] is None


def _prefetch_pages(settings: Settings) -> "Callable[[list[int]], None] | None":
    """Return a function that reads a context's KV from disk while the weights load.

    None if no KV is kept on disk.
    """
    config = settings.cache_config(None if settings["incognito"] else cache_directory(settings))
    directory, block_size = config.directory, config.block_size
    if directory is None or not config.reuse:
        return None

    def begin(token_ids: list[int]) -> None:
        def read() -> None:
            from kvchat.cache.disk.inventory import prefetch_pages

            prefetch_pages(directory, token_ids, block_size)

        threading.Thread(target=read, name="kvchat-read-ahead", daemon=True).start()

    return begin


def _build(
    settings: Settings, source: "ModelSource", draft: "ModelSource | None"
) -> "Callable[[Callable[[LoadProgress], None]], tuple[Engine, ModelReady]]":
    memory = memory_of(settings)
    kept = None if settings["incognito"] else cache_directory(settings)
    shared = shared_config(settings, os.environ)
    if settings["incognito"]:
        save_nothing()

    def build(progress: Callable[[LoadProgress], None]) -> "tuple[Engine, ModelReady]":
        from kvchat.model.hf.lean_import import import_transformers, without_collection

        with without_collection():
            import_transformers()
            from kvchat.engine.assembly import build_engine
            from kvchat.model.checkpoint.used_models import UsedModels

        assembled = build_engine(
            source,
            settings.model_config(),
            settings.cache_config(kept, shared),
            settings.engine_config(),
            memory,
            progress,
            settings.speculation_config(source.name),
            draft,
        )
        UsedModels(memory).note(source)
        return assembled.engine, assembled.ready

    return build
