"""Which waiting sequence may start: whole prompts only, above a watermark, small ones past big ones for a while."""

from __future__ import annotations

from kvstore.store import KVStore
from kvstore.table import BlockTable
from workers.sequence import Request, Sequence

MAX_BYPASSED = 32
"""How many later requests may pass one that finds no room."""
MAX_BLOCKED_S = 5.0
"""How many seconds later requests may pass one that finds no room."""


def obstacle(request: Request, store: KVStore, max_model_len: int) -> str | None:
    """Why `request` can never run over `store`, with the numbers; None when it can."""
    asked = f"{len(request.prompt)} prompt tokens and max_tokens {request.sampling.max_tokens}"
    if request.longest > max_model_len:
        return f"{asked} exceed the context of {max_model_len} tokens"
    need = store.extent.most_for(request.longest)
    if need > store.total:
        return f"{asked} need {need} blocks of {store.block_size} tokens, and the whole pool has {store.total}"
    return None


class Admission:
    """`watermark` is the share of the pool that stays free while something runs; `resume_growth` the tokens for which a
    preempted sequence must find room beyond its own length, so that it does not come back only to leave again."""

    def __init__(self, store: KVStore, *, watermark: float, resume_growth: int) -> None:
        self._store = store
        self._watermark = int(store.total * watermark)
        self._resume_growth = resume_growth

    def fits(self, sequence: Sequence, now: float, *, alone: bool, extra: int = 0) -> bool:
        """Whether the pool, with `extra` blocks more, has room; a sequence `alone` may have all of it."""
        request = sequence.request
        match = self._store.match(request.namespace, sequence.findable, sequence.keys, now, request.terms)
        growth = min(self._resume_growth, request.longest - sequence.length) if sequence.preemptions else 0
        need = self._store.blocks_for(sequence.length + (0 if alone else growth))
        need += match.idle - match.adopted
        return need + (0 if alone else self._watermark) <= self._store.available + extra

    def open(self, sequence: Sequence, now: float, *, chunk: int) -> BlockTable | None:
        """Adopt the cached prefix and reserve the rest of the prompt (in windowed layer groups: what `chunk` tokens
        take); None when that must wait for steps in flight."""
        request = sequence.request
        table = self._store.adopt(request.namespace, sequence.findable, sequence.keys, now, request.terms)
        table.forgotten = sequence.forgotten
        stop = min(table.cached + chunk, sequence.length)
        if self._store.grow(table, table.cached, stop, now, reserve=sequence.length) is None:
            self._store.release(table, now)
            return None
        return table

    def holds_line(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence that found no room has been passed often or long enough for all behind it to wait."""
        if sequence.blocked_at is None:
            sequence.blocked_at = now
        return sequence.bypassed >= MAX_BYPASSED or now - sequence.blocked_at >= MAX_BLOCKED_S
