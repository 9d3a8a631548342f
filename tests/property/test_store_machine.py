"""KVStore under Hypothesis: forks, copies on write, twins, expiry, quotas, public heads, purges and fences in any
order; contents by shadow slots."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.layout import OPEN_WINDOW
from kvstore.sessions import Terms
from kvstore.store import KVStore
from kvstore.table import BlockTable

SIZE = 4
TTL = 10.0
PUBLIC = b"public"
WINDOWS = [(None,), (None, None), (None, 1), (None, 1, 1), (None, 5, 9), (6,), (9, 3), (5, 1)]


class StoreMachine(RuleBasedStateMachine):
    """Each open table carries the tokens it should hold; `slots` is what the ranks' memory would contain."""

    @initialize(total=st.integers(4, 14), windows=st.sampled_from(WINDOWS))
    def begin(self, total: int, windows: tuple[int | None, ...]) -> None:
        self.store = KVStore(total, SIZE, windows=windows, ahead=20, ttl=TTL)
        self.now = 0.0
        self.step = 0
        self.slots: list[list[int | None]] = [[None] * SIZE for _ in range(total)]
        self.open: list[tuple[BlockTable, list[int]]] = []

    def launch_and_apply(self) -> None:
        self.step += 1
        zero = self.store.pool.wash(self.step, 2)
        self.store.pool.launch(self.step)
        for block in zero:
            self.slots[block] = [None] * SIZE
        self.store.pool.apply(self.step)

    def write(self, table: BlockTable, tokens: list[int], start: int) -> bool:
        copies = self.store.grow(table, start, len(tokens), self.now)
        if copies is None:
            lacking = self.store.shortage(table, start, len(tokens))
            assert lacking > 0 or self.store.pool.dirty, "grow refuses what the pool has"
            return False
        for (_, target), content in [(pair, list(self.slots[pair[0]])) for pair in copies]:
            self.slots[target] = content
        for position in range(start, len(tokens)):
            for blocks in table.blocks:
                self.slots[blocks[position // SIZE]][position % SIZE] = hash(tuple(tokens[: position + 1]))
        self.launch_and_apply()
        self.store.seal(table, tokens, len(tokens), self.now)
        assert table.held <= self.store.extent.most_for(len(tokens))
        self.store.slide(table, len(tokens), self.now)
        return True

    @rule(
        namespace=st.sampled_from([b"x", b"y"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        keep_s=st.sampled_from([0.0, 0.0, 30.0]),
        quota=st.sampled_from([None, None, 0, 3]),
        public=st.sampled_from([0, 0, SIZE, 2 * SIZE + 1]),
    )
    def start(self, namespace: bytes, tokens: list[int], keep_s: float, quota: int | None, public: int) -> None:
        keys: list[bytes] = []
        terms = Terms(b"t", quota, quota and 2 * quota, keep_s, PUBLIC, min(public, len(tokens)))
        match = self.store.match(namespace, tokens, keys, self.now, terms)
        table = self.store.adopt(namespace, tokens, keys, self.now, terms)
        self.store.misses(table, tokens)
        assert table.cached == match.blocks * SIZE < len(tokens)
        if self.write(table, tokens, table.cached):
            self.open.append((table, list(tokens)))
        else:
            self.store.release(table, self.now)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def append(self, which: int, token: int) -> None:
        table, tokens = self.open[which % len(self.open)]
        if self.write(table, [*tokens, token], len(tokens)):
            tokens.append(token)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        table, tokens = self.open[which % len(self.open)]
        self.open.append((self.store.fork(table), list(tokens)))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        table, _ = self.open.pop(which % len(self.open))
        self.store.release(table, self.now)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.store.expire(self.now)
        self.launch_and_apply()

    @rule(namespace=st.sampled_from([b"x", b"y", PUBLIC, None]))
    def purge(self, namespace: bytes | None) -> None:
        self.store.purge(namespace)
        for name in (b"x", b"y", PUBLIC) if namespace is None else (namespace,):
            assert not self.store.sessions.blocks(name), "something outlived its purge"

    @rule(share=st.sampled_from([0.1, 0.4]))
    def audit_a_bit(self, share: float) -> None:
        assert self.store.audit(self.now, share) == 0

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check()
        for table, tokens in self.open:
            for blocks, window in zip(table.blocks, self.store.windows, strict=True):
                assert len(blocks) == -(-len(tokens) // SIZE)
                first = 0 if window is None else max(0, len(tokens) - window + 1)
                if window == OPEN_WINDOW:  # of the block that the next token goes to
                    first = len(tokens) // SIZE * SIZE
                for position in range(first, len(tokens)):
                    assert self.slots[blocks[position // SIZE]][position % SIZE] == hash(tuple(tokens[: position + 1]))

    @invariant()
    def blocks_that_several_tables_hold_are_counted_once(self) -> None:
        if not hasattr(self, "store"):
            return
        if self.store.windows[0] is not None:
            return
        tables = [table for table, _ in self.open]
        alone = [
            len(table.blocks[0]) - borrowed for table, borrowed in zip(tables, self.store.borrowed(tables), strict=True)
        ]
        assert sum(alone) == len({block for table in tables for block in table.blocks[0]})

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.audit(self.now) == 0
        for table, _ in self.open:
            self.store.release(table, self.now)
        self.store.purge()
        for _ in range(self.store.total):
            self.launch_and_apply()
        assert self.store.pool.free == self.store.total


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
