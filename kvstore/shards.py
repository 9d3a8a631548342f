"""Shards: how attention heads, and whatever else is split, spread over ranks. Arithmetic; knows no bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


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
