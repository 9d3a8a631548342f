"""ModelShape: the sizes of a model that memory depends on, and how many weights they make, whole and on one rank.

Knows neither a KV precision nor a device, and not whether this version serves the model: it is there to plan with. How
weights are spread is what `workers.models.decoder` does: heads, MLP columns and vocabulary are split, norms are whole
on every rank, a bias after a reduction is rank 0's. Sizes are in elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore.shards import HeadShard, shard_heads


@dataclass(frozen=True, slots=True)
class Elements:
    """Weights: `linears` of the layers' matrices, which may be quantised, and all `others`."""

    linears: int
    others: int

    @property
    def total(self) -> int:
        return self.linears + self.others


@dataclass(frozen=True, slots=True)
class Latent:
    """MLA's joint latent of `rank` elements with `rope` rotated ones beside it; queries pass through `q_rank` elements
    where that is not None."""

    rank: int
    rope: int
    q_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's heads. Values have `value_dim` elements (None: as keys). `window` is in tokens, the query's own
    included; None: all. With a `latent` that is what is cached, and `head_dim` counts its rotated part."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None
    window: int | None = None
    latent: Latent | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        sizes = (self.q_heads, self.kv_heads, self.head_dim, self.values, self.window or 1)
        if min(sizes) < 1 or (self.latent and min(self.latent.rank, self.latent.rope) < 1):
            raise ValueError(f"not an attention shape: {self}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads} query heads are no multiple of {self.kv_heads} KV heads")

    @property
    def values(self) -> int:
        """Elements of one value vector."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kind(self) -> str:
        """MLA, MHA, MQA or GQA."""
        if self.latent:
            return "MLA"
        return "MHA" if self.kv_heads == self.q_heads else "MQA" if self.kv_heads == 1 else "GQA"

    def shards(self, ranks: int) -> tuple[HeadShard, ...]:
        """Each rank's heads; every rank holds the one latent. ValueError for more ranks than query heads."""
        return shard_heads(self.q_heads, 1 if self.latent else self.kv_heads, ranks)

    def elements(self, hidden: int, shard: HeadShard, *, first: bool) -> Elements:
        """Weights of the heads in `shard`; `first` is rank 0."""
        bias = hidden if self.out_bias and first else 0
        out = self.values * shard.q_heads * hidden
        if self.latent:
            inner, norms = self._latent_elements(self.latent, hidden, shard.q_heads)
            return Elements(inner + out, norms + bias)
        width = self.head_dim * shard.q_heads + (self.head_dim + self.values) * shard.kv_heads
        bias += width if self.qkv_bias else 0
        return Elements(hidden * width + out, bias + (2 * self.head_dim if self.qk_norm else 0))

    def _latent_elements(self, latent: Latent, hidden: int, q_heads: int) -> tuple[int, int]:
        """Matrices and norms: projections down to the latents are whole on every rank, those up from them are not."""
        up = latent.rank * (self.head_dim - latent.rope + self.values) * q_heads
        down = hidden * (latent.rank + latent.rope)
        if latent.q_rank is None:
            return hidden * self.head_dim * q_heads + down + up, latent.rank
        query = hidden * latent.q_rank + latent.q_rank * self.head_dim * q_heads
        return query + down + up, latent.rank + latent.q_rank


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One layer's MLP of `matrices` (3: gated) with `columns` each; with `experts` so many of them, `chosen` per token,
    and `shared` columns that every token takes. `routing` counts what else decides on experts."""

    columns: int
    matrices: int = 3
    bias: bool = False
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    routing: int = 0

    def elements(self, hidden: int, rank: int, ranks: int) -> Elements:
        """Weights on `rank`: the columns of each expert are split, the router is whole on every rank."""
        columns, shared = share(self.columns, rank, ranks), share(self.shared, rank, ranks)
        matrices = self.matrices * hidden * (columns * max(1, self.experts) + shared)
        bias = (self.matrices - 1) * columns + (hidden if rank == 0 else 0) if self.bias else 0
        bias *= max(1, self.experts)
        return Elements(matrices, hidden * self.experts + self.routing + bias)

    def columns_per_token(self, rank: int, ranks: int) -> int:
        """How many columns of `rank` one token passes through."""
        return share(self.columns, rank, ranks) * max(1, self.chosen) + share(self.shared, rank, ranks)


@dataclass(frozen=True, slots=True)
class Layer:
    """`norms` are elements that every rank holds whole."""

    attention: Attention
    mlp: FeedForward
    norms: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. `context` is how many tokens its positions reach (None: not said), `dtype` the weights' own precision,
    `extra` elements beside layers and vocabulary: the last norm, learned positions."""

    name: str
    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    tied: bool
    extra: int
    context: int | None
    dtype: str

    def __post_init__(self) -> None:
        if not self.layers or self.hidden < 1 or self.vocab < 1:
            raise ValueError(f"{self.name}: a model has layers, a hidden size and a vocabulary")

    @property
    def q_heads(self) -> int:
        """The fewest query heads of a layer: no more ranks than that."""
        return min(layer.attention.q_heads for layer in self.layers)

    @property
    def experts(self) -> int:
        """Experts of the layer that has most, 0 for a dense model."""
        return max(layer.mlp.experts for layer in self.layers)

    @property
    def elements(self) -> Elements:
        """All weights, each counted once."""
        return self.rank_elements(1)[0]

    @property
    def expert_elements(self) -> int:
        """Weights of routed experts."""
        mlps = (layer.mlp for layer in self.layers)
        return sum(mlp.matrices * self.hidden * mlp.columns * mlp.experts for mlp in mlps)

    def rank_elements(self, ranks: int) -> tuple[Elements, ...]:
        """Weights on each of `ranks`. ValueError for more ranks than query heads."""
        tables = 1 if self.tied else 2
        linears = [0] * ranks
        others = [share(self.vocab, rank, ranks) * self.hidden * tables + self.extra for rank in range(ranks)]
        for layer, count in Counter(self.layers).items():
            for rank, shard in enumerate(layer.attention.shards(ranks)):
                attention = layer.attention.elements(self.hidden, shard, first=rank == 0)
                mlp = layer.mlp.elements(self.hidden, rank, ranks)
                linears[rank] += count * (attention.linears + mlp.linears)
                others[rank] += count * (attention.others + mlp.others + layer.norms)
        return tuple(map(Elements, linears, others))

    def with_kv_heads(self, heads: int) -> ModelShape:
        """The same model as if each layer had `heads` KV heads and no latent. ValueError unless they divide the query
        heads."""
        return self._changed(lambda attention: replace(attention, kv_heads=heads, latent=None))

    def with_window(self, window: int) -> ModelShape:
        """The same model as if no layer saw more than `window` tokens."""
        return self._changed(lambda attention: replace(attention, window=min(window, attention.window or window)))

    def _changed(self, change: Callable[[Attention], Attention]) -> ModelShape:
        return replace(self, layers=tuple(replace(layer, attention=change(layer.attention)) for layer in self.layers))


def share(total: int, rank: int, ranks: int) -> int:
    """How much of `total` is `rank`'s where `kvstore.layout.split_evenly` spreads it."""
    return total // ranks + (rank < total % ranks)
