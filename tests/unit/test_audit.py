"""References counted anew, a little at a time while all goes on: what differs is mended, and nothing else is."""

from __future__ import annotations

import random

import pytest

from kvstore.pool import State
from kvstore.store import KVStore
from kvstore.table import BlockTable


class Traffic:
    """Seeded tables that come, grow, fork, share and go."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = KVStore(48, 2, ttl=5.0, windows=self.rng.choice([(None,), (None, None), (None, 5), (4,)]))
        self.open: list[tuple[BlockTable, list[int]]] = []
        self.now = 0.0
        self.step = 0

    def move(self) -> None:
        rng, store = self.rng, self.store
        self.now += 0.1
        choice = rng.random()
        if choice < 0.4 or not self.open:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 10))]
            table = store.adopt(rng.choice([b"a", b"b"]), tokens, [], self.now)
            self.write(table, tokens, table.cached)
        elif choice < 0.6:
            table, tokens = rng.choice(self.open)
            self.write(table, tokens, len(tokens), fresh=rng.randint(1, 3))
        elif choice < 0.7:
            table, tokens = rng.choice(self.open)
            self.open.append((store.fork(table), list(tokens)))
        else:
            table, _ = self.open.pop(rng.randrange(len(self.open)))
            store.release(table, self.now)
        store.expire(self.now)
        self.step += 1
        store.pool.wash(self.step, 4)
        store.pool.launch(self.step)
        store.pool.apply(self.step)

    def write(self, table: BlockTable, tokens: list[int], start: int, fresh: int = 0) -> None:
        longer = [*tokens, *(self.rng.randrange(2) for _ in range(fresh))]
        if self.store.grow(table, start, len(longer), self.now) is not None:
            tokens[:] = longer
            self.store.seal(table, tokens, len(tokens), self.now)
            if not fresh:
                self.open.append((table, tokens))
        elif not fresh:
            self.store.release(table, self.now)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.45, 1.0])
def test_an_audit_in_slices_finds_nothing_wrong_while_all_is_right(share: float) -> None:
    for seed in range(40):
        traffic = Traffic(seed)
        for _ in range(120):
            traffic.move()
            assert traffic.store.audit(traffic.now, share) == 0, f"seed {seed}"
        traffic.store.check()


def spoil(store: KVStore, rng: random.Random) -> None:
    """One reference too many, or one too few, somewhere."""
    pool = store.pool
    held = [block for block in range(store.total) if pool.states[block] is State.HELD]
    if held:
        block = rng.choice(held)
        before = pool.refs[block]
        pool.refs[block] += rng.choice([1, 1, -1])
        pool.shared += (pool.refs[block] > 1) - (before > 1)


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_what_differs_is_mended_within_two_passes_and_counted(share: float) -> None:
    spoilt = 0
    for seed in range(60):
        traffic = Traffic(seed)
        for _ in range(seed % 30 + 5):
            traffic.move()
        right = list(traffic.store.pool.refs)
        for _ in range(3):
            spoil(traffic.store, traffic.rng)
        wrong = sum(a != b for a, b in zip(right, traffic.store.pool.refs, strict=True))
        spoilt += wrong
        found = sum(traffic.store.audit(traffic.now, share) for _ in range(int(2 / share) + 3))
        assert found == wrong == traffic.store.leaked, f"seed {seed}"
        traffic.store.check()
        for table, _ in traffic.open:
            traffic.store.release(table, traffic.now)
        traffic.store.check()
        assert traffic.store.pool.held == 0
    assert spoilt > 20


def test_a_block_that_nobody_holds_any_more_comes_back() -> None:
    store = KVStore(8, 2)
    table = store.adopt(b"n", [1, 2, 3], [], 0.0)
    assert store.grow(table, 0, 3, 0.0) is not None
    store.seal(table, [1, 2, 3], 3, 0.0)
    store._holdings._tables.clear()
    store._holdings._audit.closing(table)
    assert store.audit(0.0) == 2 and store.leaked == 2
    store.check()
    assert store.pool.dirty == 2, "zeroed before anybody gets it"


def test_a_block_that_is_free_and_in_a_table_is_taken_out_of_circulation() -> None:
    store = KVStore(8, 2)
    table = store.adopt(b"n", [1, 2, 3], [], 0.0)
    assert store.grow(table, 0, 3, 0.0) is not None
    store.pool.drop(table.blocks[0][0], sealed=False, now=0.0)
    assert table.blocks[0][0] in store.pool.ready_blocks()
    assert store.audit(0.0) == 1
    store.check()
    assert table.blocks[0][0] not in store.pool.ready_blocks()
