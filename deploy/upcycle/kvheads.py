"""KVHeads: the query and KV heads of a checkpoint, from its config.json and the headers of its safetensors; and why
some checkpoints' KV heads cannot be pooled. Loads no torch, reads no weights, knows nothing of what pooling costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kvstore.layout import LayerKV, Precision
from workers.models.document import load_object
from workers.models.rope import Unsupported

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

POOLABLE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "PhiForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "OlmoForCausalLM",
    "GraniteForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "SmolLM3ForCausalLM",
    "HeliumForCausalLM",
    "GlmForCausalLM",
)
"""Architectures with a k_proj and a v_proj of their own per layer, and num_key_value_heads in config.json."""

_QK_NORM = (
    "it normalises each key head (QK-norm) with a weight trained for unpooled heads: the mean of differently directed "
    "heads is shorter than they are, the norm scales it up again, and what it then attends to is no mean of what the "
    "heads attended to; take a model without QK-norm"
)
_MLA = (
    "it has MLA: all heads share one cached latent, so there are no KV heads to pool and its KV cache is small already"
)
_FUSED = "its query, key and value projections are one fused tensor; only separate k_proj and v_proj can be pooled"
_OWN_HEADS = "it gives each query head a KV head of its own and has no num_key_value_heads in config.json to say less"

_REFUSED = {
    **dict.fromkeys(
        (
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Gemma3ForCausalLM",
            "Gemma3ForConditionalGeneration",
            "Olmo2ForCausalLM",
            "Olmo3ForCausalLM",
            "OlmoeForCausalLM",
            "Exaone4ForCausalLM",
        ),
        _QK_NORM,
    ),
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "MiniCPM3ForCausalLM", "KimiK2ForCausalLM"), _MLA
    ),
    **dict.fromkeys(
        (
            "Phi3ForCausalLM",
            "GPT2LMHeadModel",
            "GPTNeoXForCausalLM",
            "GPTBigCodeForCausalLM",
            "FalconForCausalLM",
            "BloomForCausalLM",
            "MptForCausalLM",
            "PersimmonForCausalLM",
            "DbrxForCausalLM",
            "InternLM2ForCausalLM",
            "BaichuanForCausalLM",
            "ChatGLMModel",
        ),
        _FUSED,
    ),
    **dict.fromkeys(("OPTForCausalLM", "GPTJForCausalLM", "GPTNeoForCausalLM"), _OWN_HEADS),
}
_NORM_FIELDS = ("qk_layernorm", "use_qk_norm", "qk_norm")
_NORM_TENSOR = re.compile(r"\.(?:k_norm|q_norm|k_layernorm|q_layernorm)\.")
_FUSED_TENSOR = re.compile(r"\.(?:qkv_proj|query_key_value|c_attn|W_pack|Wqkv|wqkv)\.")
_PROJECTION = re.compile(r"(?P<layer>.+\.layers\.\d+)\.self_attn\.(?P<kind>[qkv])_proj\.(?P<part>weight|bias)")
_PRECISIONS = {"BF16": Precision.BF16, "F16": Precision.FP16, "F32": Precision.FP32}


class UpcyclingError(ValueError):
    """A checkpoint or a number of heads that cannot be upcycled; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class KVHeads:
    """`projections` are the names of the K and V weights [kv_heads · head_dim, hidden] and biases [kv_heads · head_dim]
    of all layers; `precision` is that of the weights, and so of a KV cache that keeps it; `shards` the weight files."""

    architecture: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    precision: Precision
    projections: frozenset[str]
    shards: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> KVHeads:
        """The heads of the model in `folder`; raises UpcyclingError when they cannot be pooled."""
        config = read_json(folder / "config.json")
        architecture = _architecture(folder, config)
        shards = _shards(folder)
        found = dict(pair for shard in shards for pair in _tensors(folder / shard))
        for pattern, why in ((_NORM_TENSOR, _QK_NORM), (_FUSED_TENSOR, _FUSED)):
            if odd := min(filter(pattern.search, found), default=None):
                raise UpcyclingError(f"{folder} cannot be upcycled (tensor {odd}): {why}")
        projections = {name: tensor for name, tensor in found.items() if _PROJECTION.fullmatch(name)}
        q_heads, layers = _count(config, "num_attention_heads"), _count(config, "num_hidden_layers")
        kv_heads, head_dim = _heads(projections, q_heads, layers)
        if config.get("num_key_value_heads") not in (None, kv_heads):
            raise UpcyclingError(
                f"config.json says num_key_value_heads {config['num_key_value_heads']}, the weights have {kv_heads}: "
                "config.json and weights are not of one model"
            )
        pooled = {name for name in projections if ".q_proj." not in name}
        precision = _precision({name: projections[name].dtype for name in pooled})
        return cls(architecture, layers, q_heads, kv_heads, head_dim, precision, frozenset(pooled), shards)

    def check(self, target: int) -> None:
        """Raise UpcyclingError unless this model's KV heads can be pooled to `target` of them."""
        if target < 1:
            raise UpcyclingError(f"{target} KV heads: there must be at least 1")
        if target > self.kv_heads:
            raise UpcyclingError(
                f"{target} KV heads: the model has fewer already, {self.kv_heads} for {self.q_heads} query heads, and "
                f"heads can only be merged; possible: {self._possible()}"
            )
        if self.kv_heads % target:
            raise UpcyclingError(
                f"{target} KV heads: {self.kv_heads} heads do not divide into so many equal groups; "
                f"possible: {self._possible()}"
            )

    def token_bytes(self, kv_heads: int | None = None) -> int:
        """Bytes of KV cache per token over all layers, unquantised, with `kv_heads` (default: as the model is)."""
        return self.layers * LayerKV.pair(kv_heads or self.kv_heads, self.head_dim, self.precision).token_bytes

    def _possible(self) -> str:
        return ", ".join(str(count) for count in range(1, self.kv_heads + 1) if self.kv_heads % count == 0)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What a header says: `dtype` in safetensors' words."""

    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises UpcyclingError."""
    try:
        content = load_object(path)
    except Unsupported as error:
        raise UpcyclingError(str(error)) from error
    if content is None:
        raise UpcyclingError(f"{path} cannot be read: there is no such file")
    return content


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    """The architecture's name, if config.json leaves no reason to refuse it."""
    names = config.get("architectures") or ["(none)"]
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else "?"
        raise UpcyclingError(
            f"{folder} is quantised ({method}): its numbers are no weights to take the mean of; "
            "upcycle the model in bf16, fp16 or fp32 and quantise the result"
        )
    if config.get("kv_lora_rank"):
        raise UpcyclingError(f"{names[0]} cannot be upcycled (config field kv_lora_rank): {_MLA}")
    if field := next((name for name in _NORM_FIELDS if config.get(name)), None):
        raise UpcyclingError(f"{names[0]} cannot be upcycled (config field {field}): {_QK_NORM}")
    if known := next((name for name in names if name in POOLABLE), None):
        return str(known)
    if refused := next((name for name in names if name in _REFUSED), None):
        raise UpcyclingError(f"{refused} cannot be upcycled: {_REFUSED[refused]}")
    raise UpcyclingError(f"architecture {', '.join(names)} is not known here; known: {', '.join(POOLABLE)}")


def _shards(folder: Path) -> tuple[str, ...]:
    """Names of the weight files."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UpcyclingError(f"{folder / INDEX} has no weight_map")
        names = tuple(sorted({str(name) for name in weight_map.values()}))
    else:
        names = (SINGLE,)
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UpcyclingError(f"{folder} has no {name}; save the model as safetensors first (save_pretrained)")
    return names


def _tensors(path: Path) -> Iterator[tuple[str, _Tensor]]:
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (the file is no dict)
                part = file.get_slice(name)
                yield name, _Tensor(part.get_dtype(), tuple(part.get_shape()))
    except (SafetensorError, OSError) as error:
        raise UpcyclingError(f"{path} is not a whole safetensors file: {error}") from error


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UpcyclingError(f"config.json: {field} must be an integer of at least 1, got {value!r}")
    return value


def _heads(projections: Mapping[str, _Tensor], q_heads: int, layers: int) -> tuple[int, int]:
    """KV heads and head_dim, as the weights have them: where config.json is silent, architectures differ in what they
    assume."""
    rows: dict[str, dict[str, int]] = {}
    for name, tensor in projections.items():
        match = _PROJECTION.fullmatch(name)
        if match and match["part"] == "weight":
            rows.setdefault(match["layer"], {})[match["kind"]] = tensor.shape[0]
    whole = [(found["q"], found["k"], found["v"]) for found in rows.values() if len(found) == 3]
    if len(whole) != layers or len(rows) != layers:
        raise UpcyclingError(
            f"config.json says {layers} layers, the weights have q_proj, k_proj and v_proj of {len(whole)}"
        )
    q, k, v = whole[0]
    if len(set(whole)) > 1 or k != v or q % q_heads or k % (q // q_heads):
        raise UpcyclingError(
            f"the layers' query, key and value projections do not hold equal heads in equal numbers (rows: "
            f"{', '.join(map(str, sorted(set(whole))))}): not supported"
        )
    return k // (q // q_heads), q // q_heads


def _precision(dtypes: Mapping[str, str]) -> Precision:
    kinds = set(dtypes.values())
    if odd := sorted(kinds - set(_PRECISIONS)):
        raise UpcyclingError(
            f"K and V projections have weight format {', '.join(odd)}: quantised or unknown; "
            "upcycle the model in bf16, fp16 or fp32"
        )
    if len(kinds) > 1:
        raise UpcyclingError(f"K and V projections mix weight formats ({', '.join(sorted(kinds))}): save them in one")
    return _PRECISIONS[kinds.pop()]
