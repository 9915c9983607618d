"""Layers with a state in torch, one row and formula at a time: what compiled kernels compute."""

import torch
from torch.nn import functional


def convolved(
    x: torch.Tensor,
    weights: torch.Tensor,
    state: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    is_activated: bool = True,
) -> torch.Tensor:
    """Return each channel's sum over its last inputs, or its silu; `state` gets the input `x`.

    x          float32 [channels]
    weights    float32 [taps, channels]
    state      [channels, taps], the last inputs, the newest last
    bias       float32 [channels]
    """
    inputs = torch.cat((state[:, 1:].float(), x[:, None]), dim=1)
    state.copy_(inputs)
    total = (inputs * weights.T).sum(dim=1)
    if bias is not None:
        total = total + bias
    return functional.silu(total) if is_activated else total


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


def mamba_step(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    step: torch.Tensor,
    rates: torch.Tensor,
    skips: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return what C reads of the state, and D times x, [heads, head dim]; `state` is changed.

    x                    float32 [heads, head dim]
    b, c                 float32 [groups, state size], each for as many heads
    step, rates, skips   float32 [heads]
    state                float32 [heads, head dim, state size]
    """
    repeats = len(x) // len(b)
    b, c = (part.repeat_interleave(repeats, 0) for part in (b, c))
    state *= (rates * step).exp()[:, None, None]
    state += torch.einsum("hp,hn->hpn", x * step[:, None], b)
    return torch.einsum("hpn,hn->hp", state, c) + x * skips[:, None]


def selective_step(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    steps: torch.Tensor,
    rates: torch.Tensor,
    skips: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return what C reads of the state of Mamba 1, and D times x, [channels]; `state` is changed.

    x, steps, skips   float32 [channels]
    b, c              float32 [state size]
    rates, state      float32 [channels, state size]
    """
    state *= (rates * steps[:, None]).exp()
    state += (x * steps)[:, None] * b
    return state @ c + x * skips


def mixed_rows(x: torch.Tensor, mixes: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """Return a row of RWKV mixed with the row before, `newest`, which gets the row.

    x        float32 [width]
    mixes    float32 [number, width], as is the result: how much of `x` each has
    newest   [width]
    """
    mixed = mixes * x + (1 - mixes) * newest.float()
    newest.copy_(x)
    return mixed


def averaged(
    keys: torch.Tensor, values: torch.Tensor, rates: torch.Tensor, bonuses: torch.Tensor
) -> torch.Tensor:
    """Return what the newest row of RWKV reads of all rows so far, [channels].

    keys, values     [rows, channels], the newest last
    rates, bonuses   [channels]
    """
    ages = torch.arange(len(keys) - 2, -2, -1).clamp(min=0)
    exponents = keys + ages[:, None] * rates
    exponents[-1] += bonuses
    return (exponents.softmax(dim=0) * values).sum(dim=0)


def group_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x [groups, width], each group normed, times weight [groups, width]."""
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon) * weight
