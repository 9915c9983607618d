"""One row of a layer of gated delta nets in torch: what `delta.py` computes, formula by formula."""

import torch
from torch.nn import functional


def convolved(x: torch.Tensor, weights: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return silu of each channel's sum over its last inputs; `state` gets the new input `x`.

    x          float32 [channels]
    weights    float32 [channels, taps]
    state      [channels, taps], the last inputs, the newest last
    """
    inputs = torch.cat((state[:, 1:].float(), x[:, None]), dim=1)
    state.copy_(inputs)
    return functional.silu((inputs * weights).sum(dim=1))


def delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return what the query reads of the state, [heads, value dim]; `state` is changed.

    query, key        float32 [key heads, key dim], each serves as many value heads
    value             float32 [heads, value dim]
    log_decay, beta   float32 [heads]
    state             float32 [heads, key dim, value dim]
    """
    repeats = len(value) // len(key)
    query, key = (
        (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, 0)
        for x in (query, key)
    )
    state *= log_decay.exp()[:, None, None]
    said = torch.einsum("hk,hkv->hv", key, state)
    state += key[:, :, None] * ((value - said) * beta[:, None])[:, None]
    return torch.einsum("hk,hkv->hv", query, state) * key.shape[1] ** -0.5


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Return the norm of each head of x [heads, value dim] times silu of its gates."""
    normed = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return normed * weight * functional.silu(gate)
