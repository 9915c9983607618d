"""Finds GGUF files: in a directory, in the hub's cache, in ollama's store. Reads no weights.

A repository often holds one model in several sizes; NAME:QUANT chooses, as in org/name:Q4_K_M.
ollama's store is read where it lies and never written.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from kvchat.core.errors import ModelError, ModelUnsupported
from kvchat.model.files.checkpoint_files import read_json, unreadable
from kvchat.model.files.hub_cache import snapshots
from kvchat.model.gguf.file import GgufModel, is_gguf, read_gguf

OLLAMA = "ollama:"
# The names of block formats, as the makers of files put them into names.
_LABEL = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32|FP16|FP32))(?=[-._]|$)", re.I
)
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_SIDE_FILE = re.compile(r"mmproj|imatrix|^mtp-", re.I)
_NAME_PART = re.compile(r"^[A-Za-z0-9][\w.-]*$")
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_LAYER = "application/vnd.ollama.image."
_PARAMETERS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "penalty_repeat",
}


def gguf_file(name: str, path: Path) -> GgufModel:
    """Return the model in a file; raises ModelError for a file that is no GGUF file."""
    if not is_gguf(path) and path.suffix != ".gguf":
        raise ModelError(
            f"{name} is a file, and not a GGUF file.",
            "Give a GGUF file, or the directory that holds config.json and *.safetensors.",
        )
    return read_gguf(path)


def gguf_names(names: Iterable[str]) -> list[str]:
    """Return the models among relative paths, of one in parts the first part, sorted."""
    return sorted(
        name
        for name in names
        if name.endswith(".gguf")
        and not _LATER_PART.search(name.removesuffix(".gguf"))
        and not _SIDE_FILE.search(PurePosixPath(name).name)
    )


def gguf_paths(directory: Path) -> list[str]:
    """Return the models in a directory and those directly below it, as relative paths."""
    found = (*directory.glob("*.gguf"), *directory.glob("*/*.gguf"))
    return gguf_names(str(path.relative_to(directory)) for path in found)


def model_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each model among files, all its parts together, by the first's name."""
    totals: dict[str, int] = {}
    for name, size in sizes.items():
        stem = _PART.sub("", name.removesuffix(".gguf"))
        totals[stem] = totals.get(stem, 0) + size
    stems = {name: _PART.sub("", name.removesuffix(".gguf")) for name in gguf_names(sizes)}
    return {name: totals[stem] for name, stem in stems.items()}


def label(name: str) -> str:
    """Return the block format that a file's name states, else the name without its suffix."""
    return format_in(name) or _PART.sub("", PurePosixPath(name).name.removesuffix(".gguf"))


def format_in(name: str) -> str:
    """Return the block format that a file's name states, "" if it states none."""
    found = _LABEL.findall(_PART.sub("", PurePosixPath(name).name.removesuffix(".gguf")))
    return str(found[-1]) if found else ""


def parts_of(first: str, names: Iterable[str]) -> list[str]:
    """Return the files among `names` that are parts of the model whose first one is given."""
    stem = _PART.sub("", first.removesuffix(".gguf"))
    return [n for n in names if n.endswith(".gguf") and _PART.sub("", n[:-5]) == stem]


def choose(name: str, names: list[str], quant: str | None) -> str:
    """Return the one file of `names` to load; raises ModelError if that is not clear."""
    wanted = [n for n in names if quant is None or label(n).lower() == quant.lower()]
    if len(wanted) == 1:
        return wanted[0]
    place = name if quant is None else name.removesuffix(f":{quant}")
    labels = ", ".join(sorted({label(n) for n in names}))
    if not names:
        raise ModelError(f"{place} holds no GGUF file.", "Check the name.")
    if not wanted:
        raise ModelError(f"{place} has no GGUF file of {quant}.", f"It has {labels}.")
    if len({label(n) for n in wanted}) == 1:
        raise ModelError(
            f"{place} has several GGUF files of {label(wanted[0])}.", "Give one file's path."
        )
    raise ModelError(
        f"{place} has several GGUF files.", f"Choose one: {place}:QUANT, QUANT one of {labels}."
    )


def gguf_in_directory(name: str, directory: Path, quant: str | None) -> GgufModel:
    """Return the only GGUF model of a directory, or that of `quant`; raises ModelError."""
    return read_gguf(directory / choose(name, gguf_paths(directory), quant))


def hub_gguf(repository: str, quant: str) -> tuple[Path, GgufModel]:
    """Return a hub repository's snapshot and its model of `quant`; downloads only its files.

    Offline, what is in the cache is used. Raises ModelError, and what the hub's client raises.
    """
    from huggingface_hub import HfApi, snapshot_download

    name = f"{repository}:{quant}"
    cached: ModelError | None = None
    for local in snapshots(repository):
        try:
            return local, gguf_in_directory(name, local, quant)
        except ModelError as error:
            cached = cached or error
    try:
        files = HfApi().list_repo_files(repository)
    except Exception:
        if cached is not None:  # its own words say what the cache has
            raise cached from None
        raise
    first = choose(name, gguf_names(files), quant)
    stem = _PART.sub("", first.removesuffix(".gguf"))
    patterns = [f"{escape(stem)}.gguf", f"{escape(stem)}-*-of-*.gguf"]
    directory = Path(snapshot_download(repository, allow_patterns=patterns))
    return directory, read_gguf(directory / first)


# ollama


def ollama_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of ollama's store, whether or not it exists."""
    named = environment.get("OLLAMA_MODELS")
    return Path(named).expanduser() if named else Path.home() / ".ollama" / "models"


def ollama_gguf(name: str) -> tuple[Path, GgufModel]:
    """Return the file and the model of `ollama:NAME[:TAG]`; raises ModelError.

    The template layer is in Go's language and is not used: the file's own chat template is.
    """
    store = ollama_directory()
    manifest = _manifest_path(store, name)
    content = read_json(manifest)
    if content is None:
        raise ModelError(
            f"ollama's store in {store} has no model {name.removeprefix(OLLAMA)}.",
            "`kvchat models list` names those it has; `ollama pull` gets others.",
        )
    layers = dict(_layers(manifest, content))
    if "adapter" in layers:
        raise ModelUnsupported(f"{name} has an adapter over its weights, which kvchat cannot add.")
    if "model" not in layers:
        raise ModelError(f"{name} has no weights in ollama's store.", "It may run in the cloud.")
    path = store / "blobs" / layers["model"][0].replace(":", "-")
    gguf = read_gguf(path)
    parameters = {}
    if "params" in layers:
        parameters = read_json(store / "blobs" / layers["params"][0].replace(":", "-")) or {}
    settings = {
        f"general.sampling.{key}": parameters[setting]
        for setting, key in _PARAMETERS.items()
        if setting in parameters
    }
    return path, replace(gguf, metadata=gguf.metadata | settings)


def ollama_models() -> Iterator[tuple[str, int]]:
    """Yield the name and the bytes of weights of every model in ollama's store."""
    manifests = ollama_directory() / "manifests"
    for path in sorted(manifests.glob("*/*/*/*")):
        host, space, model, tag = path.relative_to(manifests).parts
        try:
            layers = dict(_layers(path, read_json(path) or {}))
        except ModelError:
            continue  # what cannot be read cannot be chosen
        if "model" not in layers:
            continue
        place = "" if (host, space) == ("registry.ollama.ai", "library") else f"{space}/"
        place = place if host == "registry.ollama.ai" else f"{host}/{space}/"
        yield f"{OLLAMA}{place}{model}:{tag}", layers["model"][1]


def _manifest_path(store: Path, name: str) -> Path:
    place, _, tag = name.removeprefix(OLLAMA).partition(":")
    parts = place.split("/")
    if len(parts) > 3 or not all(map(_NAME_PART.match, (*parts, tag or "latest"))):
        raise ModelError(
            f"{name} names no model of ollama.", "Give ollama:NAME or ollama:NAME:TAG."
        )
    defaults = ["registry.ollama.ai", "library"]
    return store.joinpath("manifests", *defaults[: 3 - len(parts)], *parts, tag or "latest")


def _layers(path: Path, manifest: dict[str, Any]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield each layer's kind with its digest and size; raises ModelError for another content."""
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise unreadable(path, "it is not a manifest of ollama's")
    for layer in layers:
        if not isinstance(layer, dict):
            raise unreadable(path, "it is not a manifest of ollama's")
        kind, digest, size = layer.get("mediaType"), layer.get("digest"), layer.get("size")
        if not isinstance(kind, str) or not isinstance(digest, str) or not _DIGEST.match(digest):
            raise unreadable(path, "it names a layer by no digest")
        yield kind.removeprefix(_LAYER), (digest, size if type(size) is int else 0)
