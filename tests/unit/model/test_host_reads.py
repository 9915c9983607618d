"""No supported family needs values on the host in a decode, told without weights or a GPU.

One decode and one verification of every family run on torch's meta device under the same trap that
is set before the first capture. Families that needed values would be listed here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvchat.model.checkpoint.source import ModelSource
from kvchat.model.gpu.cuda_graph import NotGraphable, trapping_host_reads
from kvchat.model.gpu.step_buffers import StepBuffers, StepShape
from kvchat.model.hf.module_adapter import OWN_ATTENTION, PAGED, freeze_rope, register_attention
from kvchat.model.hf.probe import ProbeInconclusive, probe
from kvchat.model.loader import LoadedModel
from kvchat.model.paged_model import PagedModel
from kvchat.model.spec import ModelSpec
from support.architectures import SUPPORTED
from support.checkpoints import tiny_config
from support.specimens import Specimen

GetSpecimen = Callable[[str], Specimen]
# name -> what its reason says: these run eagerly.
NOT_GRAPHABLE: dict[str, str] = {}
META = torch.device("meta")
# Grouped expert products exist on meta in bfloat16 only.
DTYPE = torch.bfloat16
BLOCK_SIZE = 16
MAX_CONTEXT = 64
SHAPES = (StepShape(1, 1), StepShape(2, 3))


def model_on_meta(config: Any, spec: ModelSpec) -> PagedModel:
    """Return a model without weights, bound to pools without memory. Changes `config`."""
    register_attention()
    own = OWN_ATTENTION.get(config.model_type)
    with META:
        module = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if own else PAGED, dtype=DTYPE
        )
    freeze_rope(module, MAX_CONTEXT)
    loaded = LoadedModel(
        source=ModelSource(config.model_type, Path()),
        module=module.eval().requires_grad_(False),
        spec=spec,
        device=META,
        dtype=DTYPE,
        max_context=MAX_CONTEXT,
        identity="",
        load_s=0.0,
    )
    pools = [
        tuple(
            torch.empty(2, BLOCK_SIZE, layer.num_kv_heads, dim, dtype=DTYPE, device=META)
            for dim in (layer.key_dim, layer.value_dim)
        )
        for layer in spec.storing_layers
    ]
    return PagedModel(loaded, [(keys, values) for keys, values in pools])


def why_not_graphable(config: Any, spec: ModelSpec) -> str | None:
    """Return why a graph could not repeat a decode or a verification; None where it could."""
    model = model_on_meta(config, spec)
    buffers = StepBuffers(SHAPES, BLOCK_SIZE, MAX_CONTEXT, 0, META)
    try:
        for shape in SHAPES:
            with trapping_host_reads():
                model.forward(buffers.batch(shape))
    except NotGraphable as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_decode_of_every_supported_family_can_be_captured(name, specimen):
    model_type, settings = SUPPORTED[name]
    config = tiny_config(model_type, **settings)
    try:
        spec = probe(config)
    except ProbeInconclusive:
        spec = specimen(name).loaded.spec

    reason = why_not_graphable(config, spec)

    assert reason == NOT_GRAPHABLE.get(name)


def test_every_layer_of_the_trial_writes_and_attends() -> None:
    config = tiny_config("llama")
    spec = probe(config)
    model = model_on_meta(config, spec)

    with pytest.raises(AssertionError, match="outside of a step"):
        model._module(input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"))


def test_a_model_that_reads_values_is_told_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama")
    spec = probe(config)
    plain = torch.nn.SiLU.forward

    def nosy(self: torch.nn.SiLU, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) if bool((x > 0).any()) else x

    monkeypatch.setattr("transformers.activations.SiLUActivation.forward", nosy, raising=False)
    monkeypatch.setattr(torch.nn.SiLU, "forward", nosy)

    reason = why_not_graphable(config, spec)

    assert reason is not None
    assert reason.startswith("the host reads values")
    assert f"{Path(__file__).name}:" in reason


# The trap. `x` is [4, 3] float, on a device with values and on one without.

Use = Callable[[torch.Tensor], object]
READS: dict[str, Use] = {
    "a number": lambda x: x.sum().item(),
    "a number as float()": lambda x: float(x[0, 0]),
    "a branch": lambda x: 1 if (x > 0).all() else 2,
    "membership": lambda x: 3.0 in x,
    "nonzero": lambda x: x.nonzero(),
    "where without values": lambda x: torch.where(x > 0),
    "a mask as index": lambda x: x[x[:, 0] > 0],
    "rows set by a mask": lambda x: x.clone().index_put_((x[:, 0] > 0,), x[:1]),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "lengths": lambda x: x.repeat_interleave(x[:, 0].long(), dim=0),
    "bincount": lambda x: x[0].long().bincount(),
    "equality": lambda x: torch.equal(x, x + 1),
}
CROSSINGS: dict[str, Use] = {
    "a list": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x + torch.ones(4, 3).to(x.device),
    "copied from the host": lambda x: x.clone().copy_(torch.ones(4, 3)),
    "an index of the host's": lambda x: x[torch.tensor([1, 2])],
    "a new tensor of the host's numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
}
HARMLESS: dict[str, Use] = {
    "shapes": lambda x: x.new_empty(x.shape[0], len(x)),
    "numbers set by a mask": lambda x: x.clone().index_put_(
        (x > 0,), torch.zeros((), device=x.device)
    ),
    "filled by a mask": lambda x: x.masked_fill(x > 0, 1.0),
    "choices": lambda x: torch.where(x > 0, x, -x).topk(2).indices,
    "gathered rows": lambda x: x[torch.arange(2, device=x.device)],
    "fixed repeats": lambda x: x.repeat_interleave(2, dim=0),
    "sorted": lambda x: x.argsort().cumsum(0),
    "a number of the host's": lambda x: x * 2.0 + torch.tensor(3.0),
}


def values(device: str) -> torch.Tensor:
    return torch.arange(12.0).view(4, 3).to(device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", READS)
def test_the_trap_shuts_on_reads(name: str, device: str) -> None:
    x = values(device)
    with pytest.raises(NotGraphable), trapping_host_reads():
        READS[name](x)


@pytest.mark.parametrize("name", CROSSINGS)
def test_the_trap_shuts_on_copies_between_devices(name: str) -> None:
    x = values("meta")
    with pytest.raises(NotGraphable), trapping_host_reads():
        CROSSINGS[name](x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", HARMLESS)
def test_the_trap_stays_open_for_what_a_graph_can_repeat(name: str, device: str) -> None:
    x = values(device)
    with trapping_host_reads():
        HARMLESS[name](x)
