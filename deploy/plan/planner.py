"""What a model takes in memory, rank by rank, and whether it fits: arithmetic on shapes. Bytes everywhere.

KV bytes are those of `kvstore.layout`, the same that ranks build their pools from; buffers are an estimate by
`workers.demand`, for kernels that read the pages where they lie. It measures nothing and knows no model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from deploy.plan.shapes import Attention, Elements, ModelShape, share
from kvstore.layout import KVLayout, LayerGroup, LayerKV, Precision, Vector
from workers.demand import Demand
from workers.plan import Draw, Row, StepPlan

KV_PRECISIONS = tuple(precision.label for precision in Precision)
WEIGHT_BYTES = {"fp32": (4, 4), "bf16": (2, 2), "fp16": (2, 2), "fp8": (1, 2), "int8": (1, 2)}
"""Precision of the weights → bytes of an element of the layers' matrices, and of all else."""
RUNTIME = {"gpu": 3 * 2**28, "cpu": 5 * 2**26}
"""An estimate of what a rank's process holds of its device before any weight: the runtime, libraries, buffers of
collectives."""
_BOUND = 2**44
"""More tokens or sequences than this are as good as any number."""


class PlanError(ValueError):
    """What was asked for cannot be planned; the message says what to change."""


def layer_kv(attention: Attention, heads: int, precision: str) -> LayerKV:
    """What one layer keeps of one token on a rank with `heads` of its KV heads. PlanError for what it cannot."""
    stored = Precision.parse(precision)
    if attention.latent:
        if stored.by_channel:
            raise PlanError(f"MLA's latents cannot be kept in {precision}; ask for int4")
        return LayerKV.latent(attention.latent.rank, attention.latent.rope, stored)
    pair = Vector(attention.head_dim, stored), Vector(attention.values, stored.of_values)
    return LayerKV(heads, pair, attention.window)


def layouts(shape: ModelShape, block_size: int, precision: str, ranks: int) -> tuple[KVLayout, ...]:
    """The pages of each rank. PlanError when there are more ranks than query heads."""
    if ranks > shape.q_heads:
        raise PlanError(f"{shape.name}: --tp {ranks} is more than its {shape.q_heads} query heads; use at most that")
    kinds = set(shape.layers)
    shards = {layer: layer.attention.shards(ranks) for layer in kinds}
    found = []
    for rank in range(ranks):
        kept = {layer: layer_kv(layer.attention, shards[layer][rank].kv_heads, precision) for layer in kinds}
        found.append(KVLayout(block_size, tuple(kept[layer] for layer in shape.layers)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Hardware:
    """`devices` GPUs of `device_bytes` each, or ("cpu") one machine whose memory all ranks share. `share` of it is for
    weights, buffers and pool."""

    kind: str
    devices: int
    device_bytes: int
    share: float

    def groups(self, ranks: int) -> int:
        """How many groups of so many ranks find a device each."""
        return 1 if self.kind == "cpu" else self.devices // ranks

    def budget(self, ranks: int) -> int:
        """Bytes that one rank of a group may use."""
        return int(self.device_bytes * (self.share / ranks if self.kind == "cpu" else self.share))

    def rank_bytes(self, ranks: int) -> int:
        """Bytes that there are for one rank."""
        return self.device_bytes // ranks if self.kind == "cpu" else self.device_bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to run at once in a group: `batch` sequences of `context` tokens each, in steps of `step_tokens`."""

    context: int
    batch: int
    ranks: int = 1
    kv_precision: str = "bf16"
    weights: str = "bf16"
    block_size: int = 32
    step_tokens: int = 512
    kv_memory: int | None = None


@dataclass(frozen=True, slots=True)
class RankNeed:
    """One rank: its pages, the bytes of its weights, and of its buffers per token of a step and per sequence that is
    sampled."""

    layout: KVLayout
    groups: tuple[LayerGroup, ...]
    weights: int
    runtime: int
    step_bytes: int
    logit_bytes: int

    def held(self, tokens: int) -> int:
        """Bytes of the blocks that a sequence of `tokens` holds: a windowed layer keeps those its window touches."""
        blocks = sum(self.layout.blocks_for(tokens, group.window) for group in self.groups)
        return blocks * self.layout.block_bytes

    def buffers(self, batch: int, step_tokens: int) -> int:
        """Bytes beside weights and pool."""
        return self.runtime + max(step_tokens, batch) * self.step_bytes + batch * self.logit_bytes

    def total(self, batch: int, context: int, step_tokens: int) -> int:
        """Bytes of everything."""
        return self.weights + self.buffers(batch, step_tokens) + batch * self.held(context)


class Plan:
    """How `shape` sits on `hardware` when `ask` is to run. Raises PlanError."""

    def __init__(self, shape: ModelShape, hardware: Hardware, ask: Ask) -> None:
        if ask.weights not in WEIGHT_BYTES:
            raise PlanError(f"unknown weight precision {ask.weights!r}; known: {', '.join(WEIGHT_BYTES)}")
        if ask.kv_precision not in KV_PRECISIONS:
            raise PlanError(f"unknown KV precision {ask.kv_precision!r}; known: {', '.join(KV_PRECISIONS)}")
        if min(ask.context, ask.batch, ask.ranks) < 1:
            raise PlanError("context, batch and tp must be at least 1")
        self.shape, self.hardware, self.ask = shape, hardware, ask
        self.whole = layouts(shape, ask.block_size, ask.kv_precision, 1)[0]
        self.ranks = self._needs()

    @property
    def budget(self) -> int:
        """Bytes that each rank may use."""
        return self.hardware.budget(self.ask.ranks)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return _weight_bytes(self.shape.elements, self.ask.weights)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the tokens asked for take, each counted once and no window's rest, over all layers."""
        return self.ask.batch * self.whole.bytes_for(self.ask.context)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """Bytes of the blocks that hold them, on each rank."""
        return tuple(self.ask.batch * rank.held(self.ask.context) for rank in self.ranks)

    @property
    def fullest(self) -> RankNeed:
        """The rank that needs most: it decides what fits."""
        return max(self.ranks, key=lambda rank: rank.total(self.ask.batch, self.ask.context, self.ask.step_tokens))

    @property
    def idle_bytes(self) -> int:
        """Bytes that stay empty on ranks with fewer heads, when each rank sets aside what the fullest one holds."""
        held = self.held_bytes
        return sum(max(held) - own for own in held)

    @property
    def copied_bytes(self) -> int:
        """Bytes that ranks hold of what another rank holds as well: MLA's latent, KV heads that ranks share."""
        return sum(self.held_bytes) - self.ask.batch * self._whole_need.held(self.ask.context)

    @property
    def pool_blocks(self) -> int:
        """Blocks of the group's pool beside what runs: the rank that can hold fewest sets the count."""
        if self.ask.kv_memory is not None:
            return min(rank.layout.blocks_in(self.ask.kv_memory) for rank in self.ranks)
        return min(rank.layout.blocks_in(max(0, self._room(rank))) for rank in self.ranks)

    @property
    def pool_bytes(self) -> tuple[int, ...]:
        """Bytes of each rank's pool."""
        return tuple(self.pool_blocks * rank.layout.block_bytes for rank in self.ranks)

    @property
    def pool_share(self) -> float:
        """What the KV pool is of the memory of the fullest rank's device."""
        return max(self.pool_bytes) / self.hardware.rank_bytes(self.ask.ranks)

    @property
    def need_share(self) -> float:
        """What the KV cache that was asked for is of all that the fullest rank needs."""
        ask, rank = self.ask, self.fullest
        return ask.batch * rank.held(ask.context) / rank.total(ask.batch, ask.context, ask.step_tokens)

    @property
    def fits(self) -> bool:
        """Whether what was asked for fits."""
        return self.fits_with(self.ask.batch, self.ask.context)

    def fits_with(self, batch: int, context: int) -> bool:
        """Whether `batch` sequences of `context` tokens fit on every rank, and every rank finds a device."""
        if not self.hardware.groups(self.ask.ranks):
            return False
        return all(self._fits_on(rank, batch, context) for rank in self._kinds)

    @cached_property
    def max_batch(self) -> int:
        """The most sequences of this context that fit; 0: none."""
        found = greatest(lambda batch: self.fits_with(batch, self.ask.context))
        assert found is not None, "every sequence takes a block"
        return found

    @cached_property
    def max_context(self) -> int | None:
        """The longest context at this batch that fits, in tokens; 0: none, None: any (every layer has a window)."""
        return greatest(lambda context: self.fits_with(self.ask.batch, context))

    def _fits_on(self, rank: RankNeed, batch: int, context: int) -> bool:
        if self.ask.kv_memory is not None and batch * rank.held(context) > self.ask.kv_memory:
            return False
        return rank.total(batch, context, self.ask.step_tokens) <= self.budget

    def _room(self, rank: RankNeed) -> int:
        """Bytes that weights and buffers leave on a rank."""
        return self.budget - rank.weights - rank.buffers(self.ask.batch, self.ask.step_tokens)

    @cached_property
    def _kinds(self) -> tuple[RankNeed, ...]:
        """The ranks that differ."""
        return tuple(
            {(rank.groups, rank.weights, rank.step_bytes, rank.logit_bytes): rank for rank in self.ranks}.values()
        )

    @cached_property
    def _whole_need(self) -> RankNeed:
        return RankNeed(self.whole, self.whole.groups, 0, 0, 0, 0)

    def _needs(self) -> tuple[RankNeed, ...]:
        ask, shape = self.ask, self.shape
        pages = layouts(shape, ask.block_size, ask.kv_precision, ask.ranks)
        weights = shape.rank_elements(ask.ranks)
        needs = []
        for layout, elements, demand in zip(
            pages, weights, _demands(shape, ask.ranks, WEIGHT_BYTES[ask.weights][1]), strict=True
        ):
            step = _buffer_bytes(demand, None)
            needs.append(
                RankNeed(
                    layout=layout,
                    groups=layout.groups,
                    weights=_weight_bytes(elements, ask.weights),
                    runtime=RUNTIME[self.hardware.kind],
                    step_bytes=step,
                    logit_bytes=_buffer_bytes(demand, Draw()) - step,
                )
            )
        return tuple(needs)


def greatest(fits: Callable[[int], bool]) -> int | None:
    """The greatest number from 0 on for which `fits`, which once false stays false; None when it never is."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > _BOUND:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _weight_bytes(elements: Elements, precision: str) -> int:
    linear, other = WEIGHT_BYTES[precision]
    return elements.linears * linear + elements.others * other


def _demands(shape: ModelShape, ranks: int, item: int) -> Iterator[Demand]:
    """The widest layer of each rank, for kernels that gather nothing. MLA's latent is expanded to all query heads where
    a prompt is computed."""
    attentions, mlps = {layer.attention for layer in shape.layers}, {layer.mlp for layer in shape.layers}
    shards = {attention: attention.shards(ranks) for attention in attentions}
    for rank in range(ranks):
        own = {attention: shards[attention][rank] for attention in attentions}
        yield Demand(
            hidden=shape.hidden,
            q_heads=max(shard.q_heads for shard in own.values()),
            kv_heads=max(shard.q_heads if kind.latent else shard.kv_heads for kind, shard in own.items()),
            head_dim=max(attention.head_dim for attention in attentions),
            inner=max(mlp.columns_per_token(rank, ranks) for mlp in mlps),
            vocabulary=share(shape.vocab, rank, ranks) if rank else shape.vocab,
            item=item,
            slot=0,
            decodes=False,
            gather_slots=0,
            tile=0,
            block=0,
            windows=(None,),
        )


def _buffer_bytes(demand: Demand, draw: Draw | None) -> int:
    """Bytes of a step of one token, with its logits where it is sampled."""
    return sum(demand.buffers(StepPlan(0, (Row((0,), 0, ((0,),), draw),))))
