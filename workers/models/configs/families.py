"""Families: which architectures the decoder runs, and who reads their config.json."""

from __future__ import annotations

from collections.abc import Callable

from workers.models.configs.deepseek import deepseek_v2, deepseek_v3, minicpm3
from workers.models.configs.falcon import falcon
from workers.models.configs.fields import Fields
from workers.models.configs.gemma import gemma2, gemma3
from workers.models.configs.gpt import gpt2, gpt_bigcode
from workers.models.configs.llama import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from workers.models.configs.neox import gpt_neox
from workers.models.configs.phi import phi3
from workers.models.spec import ModelSpec

FAMILIES: dict[str, Callable[[Fields, str], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Phi3ForCausalLM": phi3,
    "GPT2LMHeadModel": gpt2,
    "GPTBigCodeForCausalLM": gpt_bigcode,
    "GPTNeoXForCausalLM": gpt_neox,
    "FalconForCausalLM": falcon,
    "MixtralForCausalLM": mixtral,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "MiniCPM3ForCausalLM": minicpm3,
}
"""Architecture as config.json names it → what reads the rest: (fields, architecture) → its spec, or Unsupported."""
