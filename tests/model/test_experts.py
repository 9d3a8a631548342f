"""Which experts a token goes to and with what weight, against transformers' routers; a token's sum is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from workers.kernels import Activation, Kernels
from workers.layers import TorchKernels
from workers.models.experts import Expert, Mixture, Router, route
from workers.models.shapes import Routing, Scoring
from workers.native.kernels import NativeKernels
from workers.native.library import load_library

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

HIDDEN, EXPERTS = 24, 12
V2 = {"hidden_size": HIDDEN, "num_attention_heads": 2, "n_routed_experts": EXPERTS, "num_experts_per_tok": 3}
V3 = V2 | {"n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[Any, Routing]] = {
    "mixtral": (
        MixtralTopKRouter(MixtralConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=2)),
        Routing(2),
    ),
    "qwen3": (
        Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=3)),
        Routing(3, normalised=False),
    ),
    "qwen3-normalised": (
        Qwen3MoeTopKRouter(
            Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=True)
        ),
        Routing(3),
    ),
    "v2-greedy": (
        DeepseekV2TopkRouter(DeepseekV2Config(**V2, topk_method="greedy", routed_scaling_factor=1.5)),
        Routing(3, normalised=False, scale=1.5),
    ),
    "v2-groups": (
        DeepseekV2TopkRouter(
            DeepseekV2Config(
                **V3, topk_method="group_limited_greedy", routed_scaling_factor=16.0, first_k_dense_replace=1
            )
        ),
        Routing(3, normalised=False, scale=16.0, groups=4, open_groups=2),
    ),
    "v3": (
        DeepseekV3TopkRouter(DeepseekV3Config(**V3, routed_scaling_factor=2.5)),
        Routing(3, Scoring.SIGMOID, scale=2.5, groups=4, open_groups=2, deciding=2, corrected=True),
    ),
    "v3-as-they-are": (
        DeepseekV3TopkRouter(DeepseekV3Config(**V3, norm_topk_prob=False)),
        Routing(3, Scoring.SIGMOID, False, scale=2.5, groups=4, open_groups=2, deciding=2, corrected=True),
    ),
}


def table(weights: Tensor, chosen: Tensor) -> Tensor:
    """Weight by expert, [T, EXPERTS]."""
    return torch.zeros(len(weights), EXPERTS).scatter_(1, chosen, weights)


@pytest.mark.parametrize("name", CASES)
def test_tokens_go_where_transformers_sends_them(name: str) -> None:
    router, routing = CASES[name]
    generator = torch.Generator().manual_seed(1)
    bias = None
    with torch.no_grad():
        router.weight.normal_(0, 0.5, generator=generator)
        if routing.corrected:
            bias = router.e_score_correction_bias.normal_(0, 0.5, generator=generator)
        x = torch.randn(200, HIDDEN, generator=generator)
        logits, weights, chosen = router(x)
        got = table(*route(logits.float(), routing, bias))
    assert torch.allclose(got, table(weights, chosen), atol=1e-6)
    assert ((got > 0).sum(-1) == routing.chosen).all()


def test_the_correction_is_for_the_choice_alone() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    routing = Routing(1, Scoring.SIGMOID, normalised=False)
    weights, chosen = route(logits, routing, torch.tensor([0.0, 0.0, 0.0, 9.0]))
    assert (chosen.item(), weights.item()) == (3, pytest.approx(logits[0, 3].sigmoid().item()))


def mixture(kernels: Kernels, *, shared: bool) -> Mixture:
    """One over random experts."""
    generator = torch.Generator().manual_seed(2)

    def expert(slot: str) -> Expert:
        gate, up = (torch.randn(16, HIDDEN, generator=generator) for _ in range(2))
        down = torch.randn(HIDDEN, 16, generator=generator)
        inner = kernels.gated(gate, up, None, Activation.SILU, slot="inner")
        return Expert(inner, kernels.linear(down, None, slot=slot, wide=True))

    routing = Routing(3)
    logits = kernels.router(torch.randn(EXPERTS, HIDDEN, generator=generator))
    experts = [expert("given") for _ in range(EXPERTS)]
    return Mixture(
        Router(logits, routing, None), experts, expert("shared") if shared else None, lambda part, onto: onto.add_(part)
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kernels", [TorchKernels("t", torch.float32, False), None], ids=["torch", "native"])
def test_a_token_s_sum_does_not_depend_on_its_neighbours(kernels: Kernels | None, shared: bool) -> None:
    native = kernels is None
    parts = mixture(kernels or NativeKernels(load_library()), shared=shared)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(70, HIDDEN, generator=generator)
    x = x.bfloat16() if native else x
    stream = torch.randn(70, HIDDEN, generator=generator)
    whole = parts(x, stream.clone()).clone()
    assert (whole - stream).abs().mean() > 1
    for step in ([0], [69, 3, 5], list(range(40, 70)), list(range(69, -1, -1))):
        got = parts(x[step].contiguous(), stream[step].clone())
        if native:
            assert torch.equal(got, whole[step])
        else:  # torch's own products depend on how many rows there are
            assert (got - whole[step]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["torch", "native", "native-int8"])
def test_sixteen_bit_kernels_score_experts_in_fp32(kind: str) -> None:
    if kind == "torch":
        kernels: Kernels = TorchKernels("t", torch.bfloat16, False)
    else:
        kernels = NativeKernels(load_library(), "int8" if kind == "native-int8" else "auto")
    generator = torch.Generator().manual_seed(4)
    weight, x = (torch.randn(rows, HIDDEN, generator=generator).bfloat16() for rows in (EXPERTS, 9))
    expected = x.double() @ weight.double().t()
    assert (kernels.router(weight)(x) - expected).abs().max() < 1e-5
