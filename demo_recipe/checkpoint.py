"""Weights and training state on disk: safetensors and JSON, never a pickle.

A checkpoint folder is written beside the old one and renamed into place, so that a kill leaves one
of the two whole. Knows the network's geometry; knows no training loop.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from demo_recipe.network import Geometry, Network
from demo_recipe.optimiser import Optimiser


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a run has come."""

    next_leg: int = 0
    seconds: float = 0.0


def save_checkpoint(folder: Path, network: Network, optimiser: Optimiser, reached: Reached) -> None:
    """Write everything a resumed run needs."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(network.state_dict(), fresh / "model.safetensors")
    save_file(optimiser.state(), fresh / "optimiser.safetensors")
    state = {"geometry": asdict(network.geometry), "reached": asdict(reached)}
    (fresh / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def load_checkpoint(folder: Path, network: Network, optimiser: Optimiser) -> Reached:
    """Restore a checkpoint of the same geometry in place; says how far it had come."""
    fresh = folder.with_name(folder.name + ".new")
    if not folder.exists() and (fresh / "state.json").exists():
        fresh.rename(folder)
    if not folder.exists():
        return Reached()
    state = _state(folder)
    if Geometry(**state["geometry"]) != network.geometry:
        raise ValueError(f"{folder} holds another geometry: {state['geometry']}")
    network.load_state_dict(load_file(folder / "model.safetensors"))
    optimiser.load(load_file(folder / "optimiser.safetensors"))
    return Reached(**state["reached"])


def reached(folder: Path) -> Reached:
    """How far the checkpoint in `folder` has come."""
    return Reached(**_state(folder)["reached"]) if folder.exists() else Reached()


def load_network(folder: Path) -> Network:
    """The network of a checkpoint or of a shipped model, in float32."""
    path = folder / "state.json"
    if path.exists():
        fields = _state(folder)["geometry"]
    else:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        fields = {name: config[name] for name in Geometry.__slots__}
    network = Network(Geometry(**fields))
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return network


def load_mean(shares: Mapping[Path, float]) -> Network:
    """The network whose weights are a mean of several, which descend from each other.

    `shares` says how much each counts; they sum to 1.

    After M. Wortsman et al., "Model soups: averaging weights of multiple fine-tuned models
    improves accuracy without increasing inference time" (2022).
    """
    networks = [load_network(folder) for folder in shares]
    parts = [network.state_dict() for network in networks]
    mean = {
        name: sum(share * part[name] for share, part in zip(shares.values(), parts, strict=True))
        for name in parts[0]
    }
    networks[0].load_state_dict(mean)
    return networks[0]


def export(folder: Path, network: Network, bos_id: int, end_id: int, pad_id: int) -> None:
    """Write the configs and bfloat16 weights; transformers loads them as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    config = network.geometry.hf_config(bos_id=bos_id, end_id=end_id, pad_id=pad_id)
    ends = {"bos_token_id": bos_id, "eos_token_id": [end_id], "pad_token_id": pad_id}
    for name, content in (("config.json", config), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in network.state_dict().items()}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes 0600; a shipped file is for everybody


def _state(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "state.json").read_text(encoding="utf-8")))
