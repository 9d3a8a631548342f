"""The sequences of a group that wait for a slot and blocks, in the order in which they are served."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from workers.sequence import Sequence


class WaitingList:
    """Kept sorted by `Sequence.rank`: class, then preempted before new, then arrival. Short by design: the service's
    own line lies before the group, so that adding and removing may cost O(n)."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def tokens(self) -> int:
        """Tokens that wait to be computed."""
        return sum(sequence.length for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    @property
    def next_deadline(self) -> float | None:
        """When the first of them has waited too long."""
        return min((s.deadline for s in self._sequences if s.deadline is not None), default=None)

    def late(self, now: float) -> tuple[Sequence, ...]:
        """Those whose deadline has passed."""
        return tuple(s for s in self._sequences if s.deadline is not None and s.deadline <= now)

    def preempted(self, count: int) -> tuple[Sequence, ...]:
        """The first `count` of those that ran before."""
        return tuple([s for s in self._sequences if s.preemptions][:count])

    def first(self, count: int, busy: frozenset[bytes] = frozenset()) -> tuple[Sequence, ...]:
        """The first `count`, as they stand now. Within a class, behind those that ran before, one of each tenant that
        is not `busy` goes first: what it waits for is little, and the others have much."""
        firsts = self.guests(busy)
        if not firsts:
            return tuple(self._sequences[:count])
        ahead = set(map(id, firsts))
        order = sorted(self._sequences, key=lambda s: (*s.rank[:2], id(s) not in ahead))
        return tuple(order[:count])

    def guests(self, busy: frozenset[bytes]) -> tuple[Sequence, ...]:
        """The first of each tenant that is not `busy`, while another is."""
        found: dict[bytes, Sequence] = {}
        for sequence in self._sequences if busy else ():
            tenant = sequence.request.terms.tenant
            if tenant not in busy:
                found.setdefault(tenant, sequence)
        return tuple(found.values())
