"""ModelSpec: the shape of a native model. No torch, no weights.

A shape that the decoder cannot compute is refused by name, never served wrong. It knows no config.json: how a family
spells its fields is the business of workers/models/configs, and workers/models/reading.py is who reads one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.layout import KVLayout, LayerKV, Precision
from kvstore.precisions import PrecisionError, PrecisionMap, Stored
from kvstore.shards import HeadShard, shard_heads
from workers.models.parts import PLAIN, NormKind, Residual, TensorNames
from workers.models.rope import Rope, Unsupported
from workers.models.shapes import ExpertShape, LatentShape

__all__ = ["ModelSpec", "Rope", "Unsupported"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes in elements, `norm_eps` of every norm. `qkv_bias`, `output_bias`, `mlp_bias`: which linears have one.
    `context_length` is how many tokens the model's positions reach, as it is served.

    Attention: scores are `scale` * q·k, with `softcap` as softcap * tanh(score / softcap); `windows` has each layer's
    sliding window in tokens, the query's own included (None: all). `rope` turns queries and keys, `local_rope`, where
    there is one, those of layers with a window; `learned_positions` is the size of a table of positions that are added
    to the embedding (0: none). `embedding_scale` multiplies embeddings, `logit_softcap` caps logits like scores.
    The MLP is activation(gate) * up if `gated`, else activation(up). What layers add to the stream is multiplied by
    `branch_scale`, what goes into the logits' projection by `final_scale`.

    With `latent` the model has MLA: one KV head, which is the latent, and `head_dim` counts all of a query. With
    `experts` some layers have mixtures of them. The checkpoint's last `unused_layers` are not part of the decoder.
    `fp8_block`: rows and columns of FP8 weights that share a scale, where the checkpoint has such.

    `eos_ids` are those of config.json and generation_config.json together; `dtype` is the checkpoint's own, as torch
    names it without the prefix ("bfloat16").
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    scale: float
    windows: tuple[int | None, ...]
    norm_eps: float
    tie_embeddings: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: Rope | None = None
    local_rope: Rope | None = None
    learned_positions: int = 0
    softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    activation: str = "silu"
    gated: bool = True
    norm: NormKind = NormKind.RMS
    residual: Residual = Residual.SEQUENTIAL
    names: TensorNames = PLAIN
    latent: LatentShape | None = None
    experts: ExpertShape | None = None
    branch_scale: float = 1.0
    final_scale: float = 1.0
    unused_layers: int = 0
    fp8_block: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads:
            raise Unsupported(
                f"num_attention_heads {self.q_heads} is no multiple of num_key_value_heads {self.kv_heads}"
            )
        if self.head_dim % 2 or self.head_dim < 4:
            raise Unsupported(f"head_dim {self.head_dim} is not supported: it must be even and at least 4")
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                rope.check(self.rotary_dim)

    @property
    def rotary_dim(self) -> int:
        """Values of a head that a rope is for."""
        return self.latent.rope if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Values of a head that was attended to."""
        return self.latent.values if self.latent else self.head_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in the place of an MLP."""
        return self.experts is not None and self.experts.sparse[layer]

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """All that the model turns heads by; none where positions are learned."""
        return tuple(rope for rope in (self.rope, self.local_rope) if rope is not None)

    def rope_of(self, layer: int) -> int:
        """Which of `ropes` turns the heads of `layer`; 0 where there is none."""
        return int(self.local_rope is not None and self.windows[layer] is not None)

    def shards(self, ranks: int) -> tuple[HeadShard, ...]:
        """The attention heads of each rank; ValueError when there are more ranks than query heads."""
        return shard_heads(self.q_heads, self.kv_heads, ranks)

    def layout(self, block_size: int, precision: PrecisionMap, ranks: int) -> tuple[KVLayout, ...]:
        """The pages of each rank, `block_size` tokens per block. PrecisionError for a map that names layers that are
        not there, or that keeps latents by channel; what is "auto" in it must have been settled. A latent has the
        precision that is meant for keys, and every rank has all of it."""
        stored = tuple(zip(precision.of(self.layers), self.windows, strict=True))
        if self.latent and any(one.key.by_channel for one, _ in stored):
            raise PrecisionError("", f"MLA's latents cannot be kept in {Precision.INT4_CHANNEL.label}; write int4")
        return tuple(
            KVLayout(block_size, tuple(self._kept(shard.kv_heads, one, window) for one, window in stored))
            for shard in self.shards(ranks)
        )

    def _kept(self, heads: int, stored: Stored, window: int | None) -> LayerKV:
        """What one layer keeps of a token on a rank with so many KV heads."""
        if self.latent:
            return LayerKV.latent(self.latent.rank, self.latent.rope, stored.key)
        return LayerKV.pair(heads, self.head_dim, stored.key, stored.value, window)
