"""The engine over shadow ranks under seeded drivers, and planted bugs that those drivers must notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvstore import prefixes as prefixes_module
from kvstore.holdings import Holdings
from kvstore.index import PrefixIndex
from kvstore.pool import BlockPool, State
from kvstore.prefixes import PrefixCache
from kvstore.store import KVStore
from tests.driver import Driver, Setup
from workers.flight import Part
from workers.plan import PENDING, Draw, Finish
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.waiting import WaitingList

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
    drivers = [Driver(seed).run() for seed in range(60)]
    counters = [d.scheduler.counters for d in drivers]
    assert sum(c.preemptions for c in counters) > 20
    assert sum(c.ooms for c in counters) > 20
    assert sum(c.expired_asked for c in counters) > 20
    assert sum(c.lost_to_scope for c in counters) > 20
    assert sum(d.store.evictions for d in drivers) > 20
    assert sum(d.store.expirations for d in drivers) > 20
    assert sum(d.purged for d in drivers) > 20
    assert sum(d.cached for d in drivers) > 100
    assert sum(len(d.aborted) for d in drivers) > 20
    assert sum(d.finishes[name] is Finish.ERROR for d in drivers for name in d.finishes) > 20
    assert sum(not request.sampling.max_tokens for d in drivers for request in d.sent.values()) > 20
    assert sum(len(scores) for d in drivers for scores in d.scores.values()) > 1000
    assert sum(len(told) for d in drivers for told in d.told.values()) > 1000


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rate", [0.2, 0.8])
def test_steps_without_memory_cost_no_token(depth: int, rate: float) -> None:
    for seed in range(15):
        setup = replace(Setup.of(random.Random(seed)), depth=depth, short=rate)
        driver = Driver(seed, setup=setup).run()
        assert driver.scheduler.counters.ooms > 0


def caught(seeds: range) -> bool:
    for seed in seeds:
        try:
            Driver(seed).run()
        except (AssertionError, IndexError, KeyError):
            return True
    return False


def seal_early(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = KVStore.seal

    def early(self, table, tokens, computed, now):  # type: ignore[no-untyped-def]
        seal(
            self,
            table,
            tokens,
            min(computed + self.block_size, len(table.blocks[0]) * self.block_size, len(tokens)),
            now,
        )

    monkeypatch.setattr(KVStore, "seal", early)


def skip_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def retire(self, block):  # type: ignore[no-untyped-def]
        self.states[block] = State.FREE
        self._free.append(block)

    def evictable(self):  # type: ignore[no-untyped-def]
        return next(iter(self._idle), None)

    monkeypatch.setattr(BlockPool, "_retire", retire)
    monkeypatch.setattr(BlockPool, "evictable", evictable)


def forget_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(self, block):  # type: ignore[no-untyped-def]
        if self.states[block] is State.IDLE:
            del self._idle[block]
            self.states[block] = State.HELD
            self.refs[block] += 1

    monkeypatch.setattr(BlockPool, "hold", hold)


def leak_on_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Scheduler._end

    def leaking(self, sequence, finish, now):  # type: ignore[no-untyped-def]
        if finish is Finish.ABORT and sequence.table is not None:
            self.running.remove(sequence)
            sequence.finish = finish
            del self._live[sequence.request.id, sequence.request.attempt]
            return
        end(self, sequence, finish, now)

    monkeypatch.setattr(Scheduler, "_end", leaking)


def match_by_key_alone_with_short_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = prefixes_module.chain_key
    monkeypatch.setattr(prefixes_module, "chain_key", lambda parent, tokens: chain(parent, tokens)[:1])
    monkeypatch.setattr(PrefixIndex, "find", lambda self, g, key, tokens: self._blocks.get((g, key)))


def match_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_full_before_last", lambda self, tokens: len(tokens) // self._block_size)


def ignore_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    root = prefixes_module.chain_root
    monkeypatch.setattr(prefixes_module, "chain_root", lambda namespace, scheme: root(b"", scheme))


def ignore_the_namespace_behind_a_public_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes_module, "branch_root", lambda parent, namespace: parent)


def ignore_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = prefixes_module.chain_key
    monkeypatch.setattr(prefixes_module, "chain_key", lambda parent, tokens: chain(b"", tokens))


def evict_without_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "_forget", lambda self, block: None)


def keep_computed_after_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Scheduler._start

    def keep(self, sequence, table):  # type: ignore[no-untyped-def]
        start(self, sequence, table)
        if sequence.preemptions:
            sequence.computed = sequence.length - 1

    monkeypatch.setattr(Scheduler, "_start", keep)


def seal_without_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = KVStore._seal_block

    def no_twin(self, table, group, index, content, now):  # type: ignore[no-untyped-def]
        if self._cache.index.block(group, table.keys[index]) is not None:
            return True
        return seal(self, table, group, index, content, now)

    monkeypatch.setattr(KVStore, "_seal_block", no_twin)


def release_head_first(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Holdings.close

    def head_first(self, table, now):  # type: ignore[no-untyped-def]
        for blocks in table.blocks:
            blocks.reverse()
        close(self, table, now)

    monkeypatch.setattr(Holdings, "close", head_first)


def serve_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroed by the ranks, still in the index."""

    def lapse(self, block):  # type: ignore[no-untyped-def]
        self._retention.rest(block, self.index.entry(block).namespace, 1e12)
        self._pool._washing.append((self._pool.launched + 1, block))

    monkeypatch.setattr(PrefixCache, "_lapse", lapse)


def expire_what_a_kept_session_stands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(self, now):  # type: ignore[no-untyped-def]
        for block in self._retention.over(now):
            self._lapse(block)

    monkeypatch.setattr(PrefixCache, "expire", expire)


def purge_what_is_idle_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is held, what follows it is not."""
    closure = PrefixIndex.closure
    monkeypatch.setattr(
        PrefixIndex, "closure", lambda self, blocks: closure(self, blocks) if len(blocks) < 2 else blocks
    )


def seal_after_a_purge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStore, "purge", lambda self, namespace=None: self._cache.purge(namespace)[0])


def take_back_the_short_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_back(self, flight):  # type: ignore[no-untyped-def]
        if not flight.undone:
            flight.undo()

    monkeypatch.setattr(Scheduler, "_take_back", take_back)


def take_back_what_was_planned_since(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_back(self, flight):  # type: ignore[no-untyped-def]
        for later in (*reversed(self._inflight), flight):
            if not later.undone:
                later.undo()

    monkeypatch.setattr(Scheduler, "_take_back", take_back)


def keep_what_a_dropped_step_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def undo(self):  # type: ignore[no-untyped-def]
        self.sequence.pending -= self.sampled

    monkeypatch.setattr(Part, "undo", undo)


def keep_what_a_dropped_step_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def undo(self):  # type: ignore[no-untyped-def]
        if self.holds:
            self.sequence.computed = self.start

    monkeypatch.setattr(Part, "undo", undo)


def start_what_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and is started all the same."""
    monkeypatch.setattr(WaitingList, "remove", lambda self, sequence: None)


def find_what_must_be_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache, where no logits are."""
    monkeypatch.setattr(Sequence, "findable", property(lambda self: self.tokens))


def forget_what_was_said_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties must count the token that the step before is still drawing."""
    monkeypatch.setattr(Sequence, "draw", lambda self, draw=Sequence.draw: without_pending(draw(self)))


def without_pending(draw: Draw) -> Draw:
    if draw.bend is None or PENDING not in draw.bend.output:
        return draw
    return replace(draw, bend=replace(draw.bend, output=draw.bend.output[:-1]))


def score_anew_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self, first, scores):  # type: ignore[no-untyped-def]
        self.scores.append(scores)
        self.scored = max(self.scored, first + len(scores))

    def preempt(self, sequence, now, base=Scheduler._preempt):  # type: ignore[no-untyped-def]
        base(self, sequence, now)
        sequence.scored = 0

    monkeypatch.setattr(Sequence, "take_scores", take)
    monkeypatch.setattr(Scheduler, "_preempt", preempt)


BUGS = [
    find_what_must_be_scored,
    score_anew_after_a_preemption,
    forget_what_was_said_while_a_step_runs,
    seal_early,
    skip_fence,
    forget_a_reference,
    leak_on_abort,
    match_by_key_alone_with_short_keys,
    match_the_whole_prompt,
    ignore_the_namespace,
    ignore_the_namespace_behind_a_public_head,
    ignore_the_parent,
    evict_without_forgetting,
    keep_computed_after_preemption,
    seal_without_twins,
    release_head_first,
    serve_expired,
    expire_what_a_kept_session_stands_on,
    purge_what_is_idle_only,
    seal_after_a_purge,
    take_back_the_short_step_only,
    take_back_what_was_planned_since,
    keep_what_a_dropped_step_computed,
    keep_what_a_dropped_step_sampled,
    start_what_is_late,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert caught(range(200)), f"{plant.__name__} went unnoticed"
