"""What decoders differ in, beside sizes: norms, where they stand, and what a checkpoint calls its tensors.

Only words, no maths: workers/models/decoder.py says what each of them does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NormKind(Enum):
    """RMS: RMSNorm (arXiv 1910.07467). RMS_OFFSET: the same, the checkpoint keeps weight - 1 (Gemma). LAYER: LayerNorm
    with a bias (arXiv 1607.06450)."""

    RMS = "rms"
    RMS_OFFSET = "rms_offset"
    LAYER = "layer"


class Residual(Enum):
    """Where norms stand in a layer. SEQUENTIAL: before attention and before the MLP. SANDWICH: after each of them too
    (Gemma 2). PARALLEL: attention and MLP read the same stream, each through its own norm (GPT-NeoX). SHARED: through
    one norm (Falcon)."""

    SEQUENTIAL = "sequential"
    SANDWICH = "sandwich"
    PARALLEL = "parallel"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a checkpoint keeps what, without ".weight" and ".bias".

    `root` stands before all but `heads`; a checkpoint may leave it out. From `attention_norm` on names stand inside a
    layer, whose number follows `layer`. `qkv` and `gate_up` name one tensor or one per part. A single `qkv` has
    queries, keys and values behind each other, or, if `grouped`, the query heads of the first KV head, its key, its
    value, then those of the next. A single `gate_up` of a gated MLP has gate and up behind each other. `transposed`:
    weights are [in, out]. `heads` are the names that the logits' projection goes by. What lies under `ignored` in a
    layer is not read.
    """

    root: str = "model."
    embedding: str = "embed_tokens"
    positions: str = "wpe"
    final_norm: str = "norm"
    layer: str = "layers"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    heads: tuple[str, ...] = ("lm_head",)
    ignored: tuple[str, ...] = ()
    grouped: bool = False
    transposed: bool = False


PLAIN = TensorNames()
"""Those of Llama."""
