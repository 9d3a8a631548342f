"""What the coordinator tells a running group: settings that may change while it runs, and to hand over what it runs.

Pure: knows no network and no coordinator. Limits are of the moment and lapse; settings stay until there are others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore.message import message
from workers.plan import Limits
from workers.scheduler import Scheduler

OBEY_S = 10.0
"""The coordinator's limits hold for so long after its last word; then the group goes by its own."""


@message
@dataclass(frozen=True, slots=True)
class GroupTerms:
    """Settings that a group takes while it runs. The two limits count as far as they are below what it was built with
    (0: as built). `prefix_cache` off purges what is cached; so does every other value of `purges` than before."""

    session_ttl_s: float = 300.0
    prefix_cache: bool = True
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    purges: int = 0
    log_level: str = "info"

    def capped(self, built: Limits) -> Limits:
        """Of a group that was built for `built`, what these terms let it have."""
        seqs, tokens = self.max_num_seqs or built.max_num_seqs, self.max_num_batched_tokens
        tokens = tokens or built.max_num_batched_tokens
        return replace(built, max_num_seqs=seqs, max_num_batched_tokens=tokens, chunk=tokens).within(built)


@message
@dataclass(frozen=True, slots=True)
class Orders:
    """To one group. `terms` are of the live settings' `revision`. `hand_over`: end the streams of all ingresses, so
    that what runs here is replayed elsewhere. `rebuild`: end the ranks and build them anew."""

    revision: int
    terms: GroupTerms
    hand_over: bool = False
    rebuild: bool = False


class Obedience:
    """What a scheduler goes by: limits that the coordinator repeats, within those of the settings, within those that it
    was built with. `revision` is that of the settings in force, 0 until there are any."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.revision = 0
        self._scheduler = scheduler
        self._built = self._own = scheduler.limits
        self._until = 0.0
        self._purges = 0

    def limit(self, limits: Limits, now: float) -> None:
        """The coordinator's limits, for OBEY_S from now."""
        self._until = now + OBEY_S
        self._scheduler.limits = limits.within(self._own)

    def lapse(self, now: float) -> None:
        """Without a word from the coordinator for long, the group's own limits hold."""
        if now >= self._until:
            self._scheduler.limits = self._own

    def adopt(self, orders: Orders) -> None:
        """Settings of a revision, which may be the one in force."""
        terms, store = orders.terms, self._scheduler.store
        self._own = terms.capped(self._built)
        self._scheduler.limits = self._scheduler.limits.within(self._own)
        store.live_for(terms.session_ttl_s)
        if terms.purges != self._purges or (store.caches_prefixes and not terms.prefix_cache):
            self._purges = terms.purges
            self._scheduler.purge(None)
        store.cache_prefixes(terms.prefix_cache)
        self.revision = orders.revision
