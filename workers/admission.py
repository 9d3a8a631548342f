"""Which waiting sequence may start: whole prompts only, above a watermark, small ones past big ones for a while."""

from __future__ import annotations

from kvstore.store import BlockTable, KVStore
from workers.sequence import Sequence

MAX_BYPASSED = 32
"""How many later requests may pass one that finds no room."""
MAX_BLOCKED_S = 5.0
"""How many seconds later requests may pass one that finds no room."""


class Admission:
    """`watermark` is the share of the pool that stays free while something runs; `resume_growth` the tokens for which a
    preempted sequence must find room beyond its own length, so that it does not come back only to leave again."""

    def __init__(self, store: KVStore, *, watermark: float, resume_growth: int) -> None:
        self._store = store
        self._watermark = int(store.total * watermark)
        self._resume_growth = resume_growth

    def fits(self, sequence: Sequence, now: float, *, alone: bool, extra: int = 0) -> bool:
        """Whether the pool, with `extra` blocks more, has room; a sequence `alone` may have all of it."""
        match = self._store.match(sequence.request.namespace, sequence.tokens, sequence.keys, now)
        growth = min(self._resume_growth, sequence.request.longest - sequence.length) if sequence.preemptions else 0
        need = self._store.blocks_for(sequence.length + (0 if alone else growth))
        need += match.idle - match.blocks * self._store.groups
        return need + (0 if alone else self._watermark) <= self._store.available + extra

    def open(self, sequence: Sequence, now: float) -> BlockTable | None:
        """Adopt the cached prefix and reserve the rest of the prompt; None when that must wait for steps in flight."""
        table = self._store.adopt(sequence.request.namespace, sequence.tokens, sequence.keys, now)
        if self._store.grow(table, table.cached, sequence.length, now) is None:
            self._store.release(table, now)
            return None
        return table

    def holds_line(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence that found no room has been passed often or long enough for all behind it to wait."""
        if sequence.blocked_at is None:
            sequence.blocked_at = now
        return sequence.bypassed >= MAX_BYPASSED or now - sequence.blocked_at >= MAX_BLOCKED_S
