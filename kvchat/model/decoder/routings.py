"""How the families' mixtures make factors of their experts' scores, read from their modules."""

from typing import Any

from torch import nn

from kvchat.model.decoder.decoder import Routing
from kvchat.model.decoder.matrices import Unknown, float_values
from kvchat_kernels.cpu.experts import Factors


def of_deepseek(mixture: Any, router: Any) -> Routing:
    """Sigmoids, a bias that chooses, and one scale, as DeepSeek V3's."""
    latent = getattr(mixture, "fc1_latent_proj", None)
    if router.num_group != 1 or not isinstance(latent, nn.Identity | None):
        raise Unknown("has a mixture of another kind")
    bias = float_values(router.e_score_correction_bias).flatten()
    return Routing(Factors.SIGMOID, bias, float(router.routed_scaling_factor), 1e-20)


def of_minimax(mixture: Any, router: Any) -> Routing:
    """Sigmoids and a bias that chooses."""
    return Routing(Factors.SIGMOID, float_values(mixture.e_score_correction_bias).flatten())


def of_lfm2(mixture: Any, router: Any) -> Routing:
    """Sigmoids, a bias that chooses where the configuration has one, and one scale."""
    bias = float_values(mixture.expert_bias).flatten() if mixture.use_expert_bias else None
    return Routing(Factors.SIGMOID, bias, float(router.routed_scaling_factor), 1e-6)


def of_ernie(mixture: Any, router: Any) -> Routing:
    """Shares, a bias that chooses, and a least sum."""
    bias = float_values(router.moe_statics.e_score_correction_bias).flatten()
    return Routing(Factors.SHARE, bias, least_sum=float(router.norm_min))


def of_phi(mixture: Any, router: Any) -> Routing:
    """A sparse mixer, whose code takes two experts, whatever the configuration says."""
    if router.top_k != 2:
        raise Unknown(f"chooses two experts in place of {router.top_k}")
    return Routing(Factors.SPARSE, tolerance=2 * float(router.router_jitter_noise))
