"""`kvchat models`: lists the models on this machine, gives them names, and deletes them.

Neither torch nor a tokenizer is imported: a list of a thousand files comes at once.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvchat.chat.saved_chats import saved_contexts
from kvchat.chat.surroundings import TO_A_REAL_MODEL
from kvchat.cli.build import memory_of, session_store, settings_of, store_admin, user_paths
from kvchat.cli.lines import confirm, print_line, say
from kvchat.cli.model_names import aliases, aliases_if_any, model_directories, set_alias, whole_name
from kvchat.cli.settings import Settings, name_to_keep
from kvchat.core.errors import KvchatError, UsageError
from kvchat.core.text import format_bytes, one_line
from kvchat.model.checkpoint.local_models import local_models, model_lines
from kvchat.model.checkpoint.used_models import UsedModels

# Conversations that are looked at, the last ones first.
_MOST_READ = 200


def list_models(flags: Mapping[str, Any]) -> None:
    """Print every model on this machine, one a line: format, size, place, conversations."""
    settings = settings_of(dict(flags))
    used, directories = UsedModels(memory_of(settings)), model_directories(settings)
    lines = model_lines(used.read(), directories, aliases_if_any(), _warm(settings))
    for line in lines:
        print_line(line)
    if len(lines) == 1:
        say(TO_A_REAL_MODEL)


def _warm(settings: Settings) -> dict[str, int]:
    """Return how many of the last conversations have KV on the disk, by their models' names."""
    if not (user_paths().cache.exists() or settings["cache_dir"]):
        return {}
    store = session_store(settings)
    try:
        session_ids = store.ids()[:_MOST_READ]
    except KvchatError:
        return {}
    contexts = list(saved_contexts(store, session_ids).values())
    if not contexts:
        return {}
    places = store_admin(settings).locate(contexts)
    names = (name for (name, _), place in zip(contexts, places, strict=True) if place.cached.total)
    return Counter(names)


def alias(name: str | None, model: str | None, is_removed: bool) -> None:
    """Print the aliases, or let one stand for a model, or for none any more."""
    if name is None:
        for each, target in aliases().items():
            print_line(f"{each}  {target}")
        if not aliases():
            say("There are no aliases. `kvchat models alias NAME MODEL` makes one.")
    elif is_removed:
        set_alias(name, None)
    elif model is None:
        raise UsageError("An alias stands for a model.", "kvchat models alias NAME MODEL")
    else:
        from kvchat.model.checkpoint.source import find_model

        settings = settings_of({})
        source = find_model(whole_name(settings, model))
        set_alias(name, name_to_keep(source.name))
        print_line(f"{name} stands for {source.name}.")


def remove(name: str, is_sure: bool) -> None:
    """Delete a downloaded model and print what that freed; ask first unless `is_sure`.

    Raises UsageError for a model that neither kvchat nor the hub's client wrote.
    """
    from kvchat.model.checkpoint.removal import removable
    from kvchat.model.checkpoint.removal import remove as remove_files

    settings = settings_of({})
    whole, shown = whole_name(settings, name), one_line(name, 80)
    used, directories = UsedModels(memory_of(settings)).read(), model_directories(settings)
    known = {model.name: model for model in local_models(used, directories)}
    found = removable(whole, known.get(whole))
    size = format_bytes(found.num_bytes)
    if not is_sure and not confirm(f"Delete {shown} ({size}, {found.words})?"):
        print_line("Nothing is deleted.")
        return
    remove_files(found)
    print_line(f"{size} are free. Conversations with {shown} stay; they need it again to go on.")
