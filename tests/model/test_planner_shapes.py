"""The planner counts as many weights as transformers makes of the same config, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deploy.plan.modelconfig import shape_of

pytestmark = pytest.mark.model

GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 128, "n_positions": 64}
DENSE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
FALCON = {key: value for key, value in DENSE.items() if key not in ("num_key_value_heads", "intermediate_size")}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((family, DENSE) for family in ("llama", "mistral", "qwen2", "phi3", "granite", "starcoder2", "glm4")),
    *((family, DENSE | {"head_dim": 32}) for family in ("qwen3", "gemma", "gemma2", "gemma3_text", "cohere2")),
    ("mixtral", DENSE | {"num_local_experts": 4}),
    ("qwen2_moe", DENSE | FEW | {"num_experts": 4, "shared_expert_intermediate_size": 48}),
    ("qwen3_moe", DENSE | FEW | {"num_experts": 4, "head_dim": 16}),
    ("deepseek_v2", DENSE | FEW | MLA | {"topk_method": "greedy"}),
    ("deepseek_v3", DENSE | FEW | MLA),
    ("deepseek_v3", DENSE | FEW | MLA | {"q_lora_rank": None}),
    ("falcon", FALCON),
    ("gpt_neox", DENSE | {"num_key_value_heads": 4}),
    ("gpt2", GPT),
    ("gpt_bigcode", GPT),
]


@pytest.mark.parametrize(("family", "sizes"), CASES, ids=[family for family, _ in CASES])
def test_as_many_weights_as_transformers_makes(family: str, sizes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    made = sum(weight.numel() for weight in model.parameters())
    made += sum(each.numel() for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert shape_of(config.to_dict(), family).elements.total == made
