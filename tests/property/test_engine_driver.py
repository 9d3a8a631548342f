"""The engine over shadow ranks under seeded drivers, and planted bugs that those drivers must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore import index as index_module
from kvstore import pool as pool_module
from kvstore import store as store_module
from tests.driver import Driver
from workers import scheduler as scheduler_module

SEEDS = 150


@pytest.mark.parametrize("block", range(10))
def test_random_traffic_keeps_every_invariant(block: int) -> None:
    for seed in range(block * SEEDS // 10, (block + 1) * SEEDS // 10):
        Driver(seed).run()


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
def test_long_random_traffic_keeps_every_invariant(block: int) -> None:
    for seed in range(SEEDS + block * 300, SEEDS + (block + 1) * 300):
        Driver(seed).run()


def test_the_drivers_reach_what_they_are_for() -> None:
    drivers = [Driver(seed).run() for seed in range(40)]
    assert sum(d.scheduler.counters.preemptions for d in drivers) > 20
    assert sum(d.store.evictions for d in drivers) > 20
    assert sum(d.store.expirations for d in drivers) > 20
    assert sum(d.cached for d in drivers) > 100
    assert sum(len(d.aborted) for d in drivers) > 20


def caught(seeds: range) -> bool:
    for seed in seeds:
        try:
            Driver(seed).run()
        except (AssertionError, IndexError, KeyError, TypeError):
            return True
    return False


def seal_early(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = store_module.KVStore.seal

    def early(self, table, tokens, computed, now):  # type: ignore[no-untyped-def]
        seal(self, table, tokens, min(computed + self.block_size, len(table) * self.block_size, len(tokens)), now)

    monkeypatch.setattr(store_module.KVStore, "seal", early)


def skip_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def retire(self, block):  # type: ignore[no-untyped-def]
        self.states[block] = pool_module.State.FREE
        self._free.append(block)

    def evictable(self):  # type: ignore[no-untyped-def]
        return next(iter(self._idle), None)

    monkeypatch.setattr(pool_module.BlockPool, "_retire", retire)
    monkeypatch.setattr(pool_module.BlockPool, "evictable", evictable)


def forget_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(self, block):  # type: ignore[no-untyped-def]
        if self.states[block] is pool_module.State.IDLE:
            del self._idle[block]
            self.states[block] = pool_module.State.HELD
            self.refs[block] += 1

    monkeypatch.setattr(pool_module.BlockPool, "hold", hold)


def leak_on_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    end = scheduler_module.Scheduler._end

    def leaking(self, sequence, finish, now):  # type: ignore[no-untyped-def]
        if finish is scheduler_module.Finish.ABORT and sequence.table is not None:
            self.running.remove(sequence)
            sequence.finish = finish
            del self._live[sequence.request.id, sequence.request.attempt]
            return
        end(self, sequence, finish, now)

    monkeypatch.setattr(scheduler_module.Scheduler, "_end", leaking)


def match_by_key_alone_with_short_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = store_module.chain_key
    monkeypatch.setattr(store_module, "chain_key", lambda parent, tokens: chain(parent, tokens)[:1])
    monkeypatch.setattr(index_module.PrefixIndex, "find", lambda self, g, key, tokens: self._blocks.get((g, key)))


def match_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = store_module.KVStore._lookup
    monkeypatch.setattr(
        store_module.KVStore, "_lookup", lambda self, ns, tokens, keys, now: lookup(self, ns, [*tokens, 0], keys, now)
    )


def ignore_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    root = store_module.chain_root
    monkeypatch.setattr(store_module, "chain_root", lambda namespace, scheme: root(b"", scheme))


def ignore_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = store_module.chain_key
    monkeypatch.setattr(store_module, "chain_key", lambda parent, tokens: chain(b"", tokens))


def evict_without_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.KVStore, "_forget", lambda self, block: None)


def keep_computed_after_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    start = scheduler_module.Scheduler._start

    def keep(self, sequence, table):  # type: ignore[no-untyped-def]
        start(self, sequence, table)
        if sequence.preemptions:
            sequence.computed = sequence.length - 1

    monkeypatch.setattr(scheduler_module.Scheduler, "_start", keep)


def seal_without_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = store_module.KVStore._seal_block

    def no_twin(self, table, group, index, parent, content, now):  # type: ignore[no-untyped-def]
        if self._index.occupied(group, table.keys[index]):
            return True
        return seal(self, table, group, index, parent, content, now)

    monkeypatch.setattr(store_module.KVStore, "_seal_block", no_twin)


def release_head_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self, table, now):  # type: ignore[no-untyped-def]
        del self._tables[id(table)]
        for blocks in table.blocks:
            for block in blocks:
                self.pool.drop(block, sealed=block in self._index, now=now)
            blocks.clear()

    monkeypatch.setattr(store_module.KVStore, "release", release)


def serve_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroed by the ranks, still in the index."""

    def purge(self, block):  # type: ignore[no-untyped-def]
        self.pool._idle.move_to_end(block)
        since, fence = self.pool._idle[block]
        self.pool._idle[block] = (since + 1e12, fence)
        self.pool._washing.append((self.pool.launched + 1, block))

    monkeypatch.setattr(store_module.KVStore, "_purge", purge)


BUGS = [
    seal_early,
    skip_fence,
    forget_a_reference,
    leak_on_abort,
    match_by_key_alone_with_short_keys,
    match_the_whole_prompt,
    ignore_the_namespace,
    ignore_the_parent,
    evict_without_forgetting,
    keep_computed_after_preemption,
    seal_without_twins,
    release_head_first,
    serve_expired,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert caught(range(200)), f"{plant.__name__} went unnoticed"
