"""Tiny models with experts, with MLA, or with both."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config, MiniCPM3Config, MixtralConfig, Qwen3MoeConfig

_SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LATENT: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 23,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
"""MLA with experts in all layers but the first. Chunks of 15 tokens and more are expanded."""
MIXTURES: dict[str, Any] = {
    "mixtral": MixtralConfig(
        **_SHAPE, hidden_size=96, num_attention_heads=4, num_key_value_heads=2, num_local_experts=5
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **_SHAPE,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=29,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    ),
    "deepseek_v2": DeepseekV2Config(
        **_SHAPE,
        **_LATENT,
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        routed_scaling_factor=4.0,
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v3": DeepseekV3Config(**_SHAPE, **_LATENT, q_lora_rank=22, norm_topk_prob=True),
    "minicpm3": MiniCPM3Config(
        **_SHAPE,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=22,
        kv_lora_rank=32,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        dim_model_base=32,
        scale_emb=3,
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.3],
            "long_factor": [1.5, 2.0],
            "original_max_position_embeddings": 256,
        },
    ),
}
