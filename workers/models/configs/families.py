"""Families: which architectures the decoder runs, and who reads their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workers.models.configs.deepseek import deepseek_v2, deepseek_v3, minicpm3
from workers.models.configs.falcon import falcon
from workers.models.configs.fields import Fields
from workers.models.configs.gemma import gemma2, gemma3
from workers.models.configs.gpt import gpt2, gpt_bigcode
from workers.models.configs.llama import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from workers.models.configs.neox import gpt_neox
from workers.models.configs.phi import phi3
from workers.models.rope import Unsupported
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

_ALIBI = ("BloomForCausalLM", "MptForCausalLM", "MPTForCausalLM", "BaichuanForCausalLM", "BaiChuanForCausalLM")


def spec_of(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed config.json and generation_config.json. Raises Unsupported."""
    names = config.get("architectures") or ["(none)"]
    for name in names:
        if name in FAMILIES:
            fields = Fields(config, generation)
            return replace(FAMILIES[name](fields, name), fp8_block=fields.fp8_block())
        if name in _ALIBI:
            raise Unsupported(f"architecture {name} is not supported: its positions are ALiBi biases of the scores")
    raise Unsupported(f"architecture {', '.join(names)} is not supported; known: {', '.join(FAMILIES)}")
