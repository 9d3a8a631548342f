"""Sizes: what one token, one page and one block of KV cache take in bytes, and how many blocks a budget buys.

The only file that knows sizes. It knows neither which block holds what nor what a tensor is: ranks build their pools
from the numbers here, and the store counts blocks of `KVLayout.block_size` tokens.

Bytes per token per layer: `2 * kv_heads * head_dim * bytes` for MHA, GQA and MQA; `(kv_lora_rank + qk_rope_head_dim) *
bytes` for MLA, whose joint latent is stored once. Quantised precisions add scales per (token, head), inside the page,
so that copies, sharing and sharding move them along.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, zip_longest


class Precision(Enum):
    """How one element is stored: `bits` per element, `scale_bytes` per (token, head) vector, inline in the page: an
    fp32 scale, for INT4 a scale and the lowest value, both bf16."""

    FP32 = ("fp32", 32, 0)
    BF16 = ("bf16", 16, 0)
    FP16 = ("fp16", 16, 0)
    FP8_E4M3 = ("fp8_e4m3", 8, 4)
    FP8_E5M2 = ("fp8_e5m2", 8, 4)
    INT8 = ("int8", 8, 4)
    INT4 = ("int4", 4, 4)

    def __init__(self, label: str, bits: int, scale_bytes: int) -> None:
        self.label = label
        self.bits = bits
        self.scale_bytes = scale_bytes

    @classmethod
    def parse(cls, label: str) -> Precision:
        """The precision called `label`; ValueError names the known ones."""
        for precision in cls:
            if precision.label == label:
                return precision
        raise ValueError(f"unknown KV precision {label!r}; known: {', '.join(p.label for p in cls)}")

    def vector_bytes(self, elements: int) -> int:
        """Bytes of one vector of `elements` values and its inline scale."""
        return (elements * self.bits + 7) // 8 + self.scale_bytes


@dataclass(frozen=True, slots=True)
class Vector:
    """What one head keeps of one token: a key, a value, MLA's latent, or the rotated part beside it."""

    elements: int
    precision: Precision

    @property
    def bytes(self) -> int:
        """Its scales included."""
        return self.precision.vector_bytes(self.elements)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer of one rank keeps for one token: for each of its KV heads the same `vectors`.

    `window` is the sliding window in tokens (the query's own included), None for full attention. `joint`: the vectors
    are MLA's latent and its rotated part, not a key and a value. Made by `pair` or `latent`.
    """

    heads: int
    vectors: tuple[Vector, ...]
    window: int | None = None
    joint: bool = False

    def __post_init__(self) -> None:
        if self.heads < 0 or not self.vectors or any(vector.elements < 1 for vector in self.vectors):
            raise ValueError(f"not a KV shape: {self}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}")

    @classmethod
    def pair(
        cls, heads: int, head_dim: int, key: Precision, value: Precision | None = None, window: int | None = None
    ) -> LayerKV:
        """Keys and values of `heads` KV heads; values like keys unless said otherwise."""
        return cls(heads, (Vector(head_dim, key), Vector(head_dim, value or key)), window)

    @classmethod
    def latent(cls, rank: int, rope: int, precision: Precision, kept: Precision | None = None) -> LayerKV:
        """MLA's joint latent of `rank` elements and, in precision `kept`, the `rope` rotated elements of all heads.
        Where the latent is quantised, the rotated part stays in 16 bits unless said otherwise."""
        kept = kept or (Precision.BF16 if precision.scale_bytes else precision)
        return cls(1, (Vector(rank, precision), Vector(rope, kept)), joint=True)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one head keeps per token."""
        return sum(vector.bytes for vector in self.vectors)

    @property
    def token_bytes(self) -> int:
        """Bytes this layer keeps per token, scales included."""
        return self.heads * self.slot_bytes

    @property
    def text(self) -> str:
        """As people read it: "3 × (64 int8 + 64 int8)", with a window "… in a window of 512"."""
        vectors = " + ".join(f"{vector.elements} {vector.precision.label}" for vector in self.vectors)
        return f"{self.heads} × ({vectors})" + (f" in a window of {self.window:,}" if self.window else "")

    def bytes_for(self, tokens: int) -> int:
        """Bytes this layer keeps for a sequence of `tokens` (a windowed layer keeps at most its window)."""
        return self.token_bytes * (min(tokens, self.window) if self.window else tokens)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block table, because they have the same window."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The pages of one rank: `block_size` tokens per block, one page per layer in each block of the layer's group.

    A block belongs to one group at a time, and any group may get it next: a block has `columns`, one for the page of
    the group's first layer, one for that of its second, and so on. Where layers of several windows meet, the larger
    classes are cut into groups of about the bytes of the smallest one, so that little of a block stays unused.
    """

    block_size: int
    layers: tuple[LayerKV, ...]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, got {self.block_size}")
        if not self.layers:
            raise ValueError("a layout needs at least one layer")

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups: those without a window first, then in order of their first layer. The same on every rank, as
        ranks share out heads alike in all layers."""
        members: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.window, []).append(index)
        sizes = {window: sum(map(self.page_bytes, layers)) for window, layers in members.items()}
        unit = max(1, min(sizes.values()))
        found = []
        for window, layers in sorted(members.items(), key=lambda item: item[0] is not None):
            parts = min(len(layers), -(-sizes[window] // unit))
            found += [LayerGroup(tuple(layers[a:b]), window) for a, b in split_evenly(len(layers), parts)]
        return tuple(found)

    @property
    def columns(self) -> tuple[int, ...]:
        """Bytes of each page of a block: column k has room for the k-th layer of any group."""
        pages = [[self.page_bytes(layer) for layer in group.layers] for group in self.groups]
        return tuple(max(column) for column in zip_longest(*pages, fillvalue=0))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer, its group and its column."""
        where = {
            layer: (number, column)
            for number, group in enumerate(self.groups)
            for column, layer in enumerate(group.layers)
        }
        return tuple(where[layer] for layer in range(len(self.layers)))

    @property
    def precisions(self) -> frozenset[Precision]:
        """All that occur."""
        return frozenset(vector.precision for layer in self.layers for vector in layer.vectors)

    @property
    def token_bytes(self) -> int:
        """Bytes per token over all layers of this rank."""
        return sum(layer.token_bytes for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this rank: the pages of one layer group."""
        return sum(self.columns)

    @property
    def text(self) -> str:
        """What a token's keys and values are, layers of one kind together, as people read it."""
        kinds = Counter(layer.text for layer in self.layers)
        return ", ".join(f"{count} layers of {kind}" for kind, count in kinds.items())

    def page_bytes(self, layer: int) -> int:
        """Bytes of one page of `layer`."""
        return self.block_size * self.layers[layer].token_bytes

    def blocks_in(self, budget: int) -> int:
        """How many whole blocks `budget` bytes buy on this rank."""
        return budget // self.block_bytes if self.block_bytes else 0

    def blocks_for(self, tokens: int, window: int | None = None) -> int:
        """Blocks that a sequence of `tokens` keeps in one layer group: those that its window touches."""
        blocks = -(-tokens // self.block_size)
        return blocks if window is None else min(blocks, live_blocks(window, 1, self.block_size))

    def bytes_for(self, tokens: int) -> int:
        """Bytes a sequence of `tokens` keeps on this rank, windows taken into account."""
        return sum(layer.bytes_for(tokens) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The attention heads of one rank: query heads [q_start, q_stop) and the KV heads [kv_start, kv_stop) they read."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def q_heads(self) -> int:
        return self.q_stop - self.q_start

    @property
    def kv_heads(self) -> int:
        return self.kv_stop - self.kv_start


def live_blocks(window: int, ahead: int, block_size: int) -> int:
    """The most blocks that a windowed layer group holds of one sequence, when `ahead` tokens may be on their way beyond
    those that are in place: the first of them still sees `window` - 1 tokens before it."""
    return (window + ahead + block_size - 3) // block_size + 1


def split_evenly(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """[start, stop) of each of `parts` contiguous shares of `total`; the first `total % parts` get one more."""
    small, extra = divmod(total, parts)
    starts = [part * small + min(part, extra) for part in range(parts + 1)]
    return tuple(pairwise(starts))


def shard_heads(q_heads: int, kv_heads: int, ranks: int) -> tuple[HeadShard, ...]:
    """Spread heads over `ranks`: whole KV heads while there are enough, else the query heads of a KV head are split.

    A KV head that several ranks share is held by each of them. ValueError when there is no query head for some rank,
    or when the query heads are no multiple of the KV heads.
    """
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are no multiple of {kv_heads} KV heads")
    if ranks > q_heads:
        raise ValueError(f"tensor_parallel_size {ranks} is more than the {q_heads} query heads; use at most {q_heads}")
    ratio = q_heads // kv_heads
    if ranks <= kv_heads:
        return tuple(HeadShard(a * ratio, b * ratio, a, b) for a, b in split_evenly(kv_heads, ranks))
    shards = []
    for head, (first, last) in enumerate(split_evenly(ranks, kv_heads)):
        for a, b in split_evenly(ratio, last - first):
            shards.append(HeadShard(head * ratio + a, head * ratio + b, head, head + 1))
    return tuple(shards)
