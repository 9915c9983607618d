"""MLPs and the experts of mixtures, read from transformers' modules; `Unknown` for others."""

from typing import Any

from torch.nn import functional

from kvchat.model.decoder.decoder import Mlp
from kvchat.model.decoder.matrices import (
    Matrix,
    Unknown,
    float_row,
    float_values,
    matrices_of,
    matrix_of,
    whole,
)
from kvchat.model.hf.gates import activation_of
from kvchat.model.packed.experts import (
    ExpertPacks,
    ExpertPacksByTurns,
    are_experts_by_turns,
    are_plain_experts,
    expert_packs_of,
)
from kvchat_kernels.cpu.gates import Activation

_NO_DEFAULT = object()


def part_of(module: Any, *names: str, default: Any = _NO_DEFAULT) -> Any:
    """Return the part that has one of these names; raises AttributeError without a `default`."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    return getattr(module, names[0]) if default is _NO_DEFAULT else default


def activation_in(module: Any) -> Activation:
    """Return the activation of a module; raises Unknown for one that has no kernel."""
    found = part_of(module, "act_fn", "activation_fn", "activation", "act", default=None)
    activation = activation_of(found)
    if activation is None:
        raise Unknown(f"has the activation {type(found).__name__}")
    return activation


def _xielu(act: Any) -> dict[str, float]:
    """Return the numbers of a module of xIELU, as fields of `gates.GateTask`."""
    positive, negative = (
        float(functional.softplus(float_row(part))) for part in (act.alpha_p, act.alpha_n)
    )
    linear = float(act.beta)
    return {
        "positive": positive,
        "negative": linear + negative,
        "linear": linear,
        "largest": float(act.eps),
    }


def read_mlp(module: Any) -> Mlp:
    """Return the MLP of a module, gated or not."""
    if hasattr(module, "output_linear"):  # Granite's shared expert
        both, down = matrix_of(module.input_linear), matrix_of(module.output_linear)
        return Mlp((both,), down, activation_in(module), module=module)
    if hasattr(module, "w1"):  # LFM2's, which has silu in its forward
        apart = matrix_of(module.w1), matrix_of(module.w3)
        return Mlp(apart, matrix_of(module.w2), Activation.SILU, module=module)
    if getattr(module, "activation_sparsity", 0.0):  # of some layers of Gemma 3n
        raise Unknown("has an MLP with few activations")
    if not hasattr(module, "gate_proj") and not hasattr(module, "gate_up_proj"):
        up, down = (
            part_of(module, "up_proj", "fc1", "c_fc", "dense_h_to_4h"),
            part_of(module, "down_proj", "fc2", "c_proj", "dense_4h_to_h"),
        )
        activation = activation_in(module)
        constants = _xielu(module.act_fn) if activation is Activation.XIELU else {}
        return Mlp((matrix_of(up),), matrix_of(down), activation, False, constants)
    gate_up = matrices_of(module, "gate_up_proj", ("gate_proj", "up_proj"))
    return Mlp(gate_up, matrix_of(module.down_proj), activation_in(module), module=module)


def read_experts(module: Any) -> Mlp:
    """Return the matrices of plain experts, whose rows are one below another."""
    packs = expert_packs_of(module)
    if isinstance(packs, ExpertPacksByTurns) or are_experts_by_turns(module):
        return _experts_by_turns(module, packs)
    if packs is not None and type(packs) is not ExpertPacks:
        raise Unknown("has packed experts of another form, or of a GPU")
    if packs is None and type(module).__name__ == "NemotronHExperts":  # without gates
        parts = [module.up_proj.detach(), module.down_proj.detach()]
        up, down = (Matrix(whole(part.flatten(0, 1)), None) for part in parts)
        return Mlp((up,), down, activation_in(module), is_gated=False)
    if packs is None:
        if not are_plain_experts(module):
            raise Unknown(f"has the experts {type(module).__name__}")
        parts = [module.gate_up_proj.detach(), module.down_proj.detach()]
        gate_up, down = (Matrix(whole(part.flatten(0, 1)), None) for part in parts)
        return Mlp((gate_up,), down, activation_in(module))
    gate_up_packs, down_pack = packs.gate_up, packs.down
    matrices = tuple(Matrix(pack.weights, None) for pack in gate_up_packs)
    return Mlp(matrices, Matrix(down_pack.weights, None), activation_in(module))


def _experts_by_turns(module: Any, packs: Any) -> Mlp:
    """Return the matrices of gpt-oss's experts; a GGUF file has gate and up apart."""
    biases = float_values(module.gate_up_proj_bias)
    if isinstance(packs, ExpertPacksByTurns):
        gate_up: list[Any] = [product.weights for product in packs.gate_up]
        down: Any = packs.down.weights
    else:
        parts = (module.gate_up_proj, module.down_proj)
        both, down = (whole(part.detach().transpose(1, 2)).flatten(0, 1) for part in parts)
        gate_up = [both]
    are_apart = len(gate_up) == 2
    each = (biases[:, ::2], biases[:, 1::2]) if are_apart else (biases,)
    return Mlp(
        tuple(
            Matrix(one, bias.reshape(-1).contiguous())
            for one, bias in zip(gate_up, each, strict=True)
        ),
        Matrix(down, float_values(module.down_proj_bias).flatten()),
        Activation.LIMITED,
        constants={"steepness": float(module.alpha), "limit": float(module.limit)},
        is_by_turns=not are_apart,
    )
