"""Who gives way: the lowest class first, then the sequence whose recomputation is cheapest per block freed, then the
latest. Knows sequences and the blocks that they hold alone; preempts nobody itself."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.store import KVStore
from workers.sequence import Priority, Sequence


def choose_victim(store: KVStore, candidates: Iterable[Sequence], needy: Sequence) -> Sequence | None:
    """Of `candidates`, the one to preempt so that `needy` can grow; never one of a better class."""
    weaker = [s for s in candidates if s is not needy and s.request.priority >= needy.request.priority]
    return max(weaker, key=lambda s: expendability(store, s), default=None)


def batch_victims(store: KVStore, running: Iterable[Sequence]) -> list[Sequence]:
    """Batch sequences, the one to preempt first last."""
    batch = [s for s in running if s.request.priority is Priority.BATCH]
    return sorted(batch, key=lambda s: expendability(store, s))


def freed_blocks(store: KVStore, sequences: Iterable[Sequence]) -> int:
    """Blocks that come back when these leave (each alone: what only they share is not counted)."""
    return sum(store.owned_blocks(s.table) for s in sequences if s.table)


def expendability(store: KVStore, sequence: Sequence) -> tuple[int, float, float]:
    """The higher, the sooner it gives way."""
    freed = store.owned_blocks(sequence.table) if sequence.table else 0
    cost = sequence.computed / freed if freed else float("inf")
    return (sequence.request.priority, -cost, sequence.arrived)
