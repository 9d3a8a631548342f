"""GenericSpec: the shape of a decoder that transformers' own modules compute. Knows sizes, windows and scales, not how
they were found out: that is walk.py's affair, which loads transformers and stands above this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvstore.layout import KVLayout, LayerKV
from kvstore.precisions import PrecisionMap
from kvstore.shards import HeadShard, shard_heads
from workers.models.rope import Unsupported


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer asks of attention: `window` in tokens, the query's own included (None: all); `sinks`: it has a
    logit of its own per query head in the softmax's denominator."""

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class GenericSpec:
    """Sizes in elements; all layers have the same heads. `attention` has one entry per layer. `context_length` in
    tokens. `ropes` says in whose hands positions are: transformers' of that version."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    attention: tuple[LayerAttention, ...]
    context_length: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str
    ropes: tuple[str, ...]

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> GenericSpec:
        """What `plain` gave."""
        attention = tuple(LayerAttention(**layer) for layer in plain["attention"])
        return cls(
            **{**plain, "attention": attention, "eos_ids": tuple(plain["eos_ids"]), "ropes": tuple(plain["ropes"])}
        )

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.attention)

    def shards(self, ranks: int) -> tuple[HeadShard, ...]:
        """The attention heads of the one rank; Unsupported for several."""
        if ranks != 1:
            raise Unsupported(
                f"tensor_parallel_size {ranks}: {self.architecture} is computed by transformers' own modules, which "
                "are not split over ranks; set tensor_parallel_size: 1, and groups for more throughput"
            )
        return shard_heads(self.q_heads, self.kv_heads, 1)

    def check_weights(self, precision: str) -> None:
        """Raises Unsupported for a `weight_precision` other than "auto": transformers' linears are as they are."""
        if precision != "auto":
            raise Unsupported(
                f"weight_precision {precision}: {self.architecture} is computed by transformers' own modules, whose "
                "weights stay as they are; set weight_precision: auto"
            )

    def layout(self, block_size: int, precision: PrecisionMap, ranks: int) -> tuple[KVLayout, ...]:
        """The pages of the one rank, `block_size` tokens per block. PrecisionError for a map that names layers that are
        not there; what is "auto" in it must have been settled."""
        self.shards(ranks)
        stored = precision.of(self.layers)
        pairs = (
            LayerKV.pair(self.kv_heads, self.head_dim, one.key, one.value, layer.window)
            for one, layer in zip(stored, self.attention, strict=True)
        )
        return (KVLayout(block_size, tuple(pairs)),)
