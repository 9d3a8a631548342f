"""Sizes: what one token, one page and one block of KV cache take in bytes, and how many blocks a budget buys.

The only file that knows sizes. It knows neither which block holds what nor what a tensor is: ranks build their pools
from the numbers here, and the store counts blocks of `KVLayout.block_size` tokens.

Bytes per token per layer: `2 * kv_heads * head_dim * bytes` for MHA, GQA and MQA; `(kv_lora_rank + qk_rope_head_dim) *
bytes` for MLA, whose joint latent is stored once. Quantised precisions add scales per (token, head), inside the page,
so that copies, sharing and sharding move them along.

Keys by channel (KIVI, arXiv 2402.02750, in paged form) have their scales per (block, head, channel), also in the page.
They can only be written when a block's last token is known, and never change then: the block is sealed. Until then, and
for every query of the same block, its keys lie in 16 bits in blocks of the same pool, by layer groups of their own:
what a query reads depends on its position alone. Such open keys take up to twice a page of their layer, so that there
are two groups, each with one half of the block's tokens in the columns of the sealed pages. Their tables are those of a
window of one token, so that a sequence holds few such blocks, and nothing caches them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from kvstore.shards import split_evenly


class Precision(Enum):
    """How one element is stored: `bits` per element, `scale_bytes` per (token, head) vector, inline in the page: an
    fp32 scale, for INT4 a scale and the lowest value, both bf16. INT4_CHANNEL is for keys alone: it has INT4's scale
    and lowest value per channel, from all tokens of a block."""

    FP32 = ("fp32", 32, 0)
    BF16 = ("bf16", 16, 0)
    FP16 = ("fp16", 16, 0)
    FP8_E4M3 = ("fp8_e4m3", 8, 4)
    FP8_E5M2 = ("fp8_e5m2", 8, 4)
    INT8 = ("int8", 8, 4)
    INT4 = ("int4", 4, 4)
    INT4_CHANNEL = ("int4_channel", 4, 0)

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

    @property
    def by_channel(self) -> bool:
        """Whether scales are a block's, per channel."""
        return self is Precision.INT4_CHANNEL

    @property
    def of_values(self) -> Precision:
        """What values are kept in where this is said of both: those have their scales per token always."""
        return Precision.INT4 if self.by_channel else self

    def vector_bytes(self, elements: int) -> int:
        """Bytes of one vector of `elements` values and its inline scale, if it has one of its own."""
        return (elements * self.bits + 7) // 8 + self.scale_bytes


CHANNEL_SCALE_BYTES = 4
"""Per channel of a block: the step and the lowest value, both bf16."""
OPEN_BYTES = 2
"""Per element of an open block's keys, which are bf16."""
HALVES = 2
"""Layer groups that share the keys of open blocks, and what the block size is a multiple of."""
OPEN_WINDOW = 1
"""Of the tables of open blocks: a token to come sees none of them but its own."""


@dataclass(frozen=True, slots=True)
class Vector:
    """What one head keeps of one token: a key, a value, MLA's latent, or the rotated part beside it."""

    elements: int
    precision: Precision

    @property
    def bytes(self) -> int:
        """Its scales included, where they are its own."""
        return self.precision.vector_bytes(self.elements)

    @property
    def channel_bytes(self) -> int:
        """Bytes of the scales that all such vectors of a block share."""
        return CHANNEL_SCALE_BYTES * self.elements if self.precision.by_channel else 0


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
        if any(vector.precision.by_channel for vector in self.vectors[1:]):
            raise ValueError("values are kept by token, not by channel")
        if self.joint and self.by_channel:
            raise ValueError("MLA's latents are kept by token, not by channel")

    @classmethod
    def pair(
        cls, heads: int, head_dim: int, key: Precision, value: Precision | None = None, window: int | None = None
    ) -> LayerKV:
        """Keys and values of `heads` KV heads; values like keys unless said otherwise (by token, where keys are kept by
        channel)."""
        return cls(heads, (Vector(head_dim, key), Vector(head_dim, value or key.of_values)), window)

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
        """Bytes this layer keeps per token, its own scales included."""
        return self.heads * self.slot_bytes

    @property
    def by_channel(self) -> bool:
        """Whether keys are kept by channel in sealed blocks."""
        return self.vectors[0].precision.by_channel

    @property
    def channel_bytes(self) -> int:
        """Bytes this layer keeps per block beside those of its tokens: scales by channel."""
        return self.heads * sum(vector.channel_bytes for vector in self.vectors)

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
    """Layers that share one block table, because they have the same window. `half`: it holds that half of the open
    keys, by tokens, of those of its layers that keep keys by channel."""

    layers: tuple[int, ...]
    window: int | None
    half: int | None = None


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
        if self.block_size % HALVES and any(layer.by_channel for layer in self.layers):
            raise ValueError(f"keys by channel need an even block_size, got {self.block_size}")

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups: those without a window first, then in order of their first layer; then, for each of these that
        has layers with keys by channel, the two that hold its open keys. The same on every rank, as ranks share out
        heads alike in all layers."""
        sealed = self._sealed_groups
        opened = (group for group in sealed if any(self.layers[layer].by_channel for layer in group.layers))
        return (
            *sealed,
            *(LayerGroup(group.layers, OPEN_WINDOW, half) for group in opened for half in range(HALVES)),
        )

    @property
    def _sealed_groups(self) -> tuple[LayerGroup, ...]:
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
        """Bytes of each page of a block: column k has room for the k-th layer of any group. Half of a block's open keys
        are never more than the page of their layer."""
        pages = [[self.page_bytes(layer) for layer in group.layers] for group in self._sealed_groups]
        return tuple(max(column) for column in zip_longest(*pages, fillvalue=0))

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each layer, its group and its column."""
        where = {
            layer: (number, column)
            for number, group in enumerate(self._sealed_groups)
            for column, layer in enumerate(group.layers)
        }
        return tuple(where[layer] for layer in range(len(self.layers)))

    @property
    def open_groups(self) -> tuple[tuple[int, ...], ...]:
        """Of each layer, the groups that hold its open keys, first half first; () where keys are not by channel."""
        found: list[tuple[int, ...]] = [() for _ in self.layers]
        for number, group in enumerate(self.groups):
            for layer in group.layers if group.half is not None else ():
                if self.layers[layer].by_channel:
                    found[layer] += (number,)
        return tuple(found)

    @property
    def precisions(self) -> frozenset[Precision]:
        """All that occur."""
        return frozenset(vector.precision for layer in self.layers for vector in layer.vectors)

    @property
    def token_bytes(self) -> int:
        """Bytes per token over all layers of this rank, of a block that is full and sealed; whole ones."""
        return -(-sum(map(self.page_bytes, range(len(self.layers)))) // self.block_size)

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
        """Bytes of one page of `layer`, scales included."""
        return self.block_size * self.layers[layer].token_bytes + self.layers[layer].channel_bytes

    def open_bytes(self, layer: int) -> int:
        """Bytes of half of a block's open keys of `layer`; 0 where keys are not by channel."""
        kept = self.layers[layer]
        elements = self.block_size // HALVES * kept.heads * kept.vectors[0].elements
        return OPEN_BYTES * elements if kept.by_channel else 0

    def blocks_in(self, budget: int) -> int:
        """How many whole blocks `budget` bytes buy on this rank."""
        return budget // self.block_bytes if self.block_bytes else 0

    def blocks_for(self, tokens: int, window: int | None = None) -> int:
        """Blocks that a sequence of `tokens` keeps in one layer group: those that its window touches."""
        blocks = -(-tokens // self.block_size)
        return blocks if window is None else min(blocks, live_blocks(window, 1, self.block_size))

    def bytes_for(self, tokens: int) -> int:
        """Bytes a sequence of `tokens` keeps on this rank, windows taken into account; blocks count as sealed."""
        scales = (layer.channel_bytes * self.blocks_for(tokens, layer.window) for layer in self.layers)
        return sum(layer.bytes_for(tokens) for layer in self.layers) + sum(scales)


def live_blocks(window: int, ahead: int, block_size: int) -> int:
    """The most blocks that a windowed layer group holds of one sequence, when `ahead` tokens may be on their way beyond
    those that are in place: the first of them still sees `window` - 1 tokens before it."""
    return (window + ahead + block_size - 3) // block_size + 1
