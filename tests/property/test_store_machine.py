"""KVStore under Hypothesis: forks, copies on write, twins, expiry and fences in any order; contents by shadow slots."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.store import BlockTable, KVStore

SIZE = 4
TTL = 10.0


class StoreMachine(RuleBasedStateMachine):
    """Each open table carries the tokens it should hold; `slots` is what the ranks' memory would contain."""

    @initialize(total=st.integers(4, 14), groups=st.sampled_from([1, 2]))
    def begin(self, total: int, groups: int) -> None:
        self.store = KVStore(total, SIZE, groups=groups, ttl=TTL)
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
            assert lacking > 0, "grow refuses what the pool has"
            return False
        for (_, target), content in [(pair, list(self.slots[pair[0]])) for pair in copies]:
            self.slots[target] = content
        for position in range(start, len(tokens)):
            for blocks in table.blocks:
                self.slots[blocks[position // SIZE]][position % SIZE] = hash(tuple(tokens[: position + 1]))
        self.launch_and_apply()
        self.store.seal(table, tokens, len(tokens), self.now)
        return True

    @rule(namespace=st.sampled_from([b"x", b"y"]), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def start(self, namespace: bytes, tokens: list[int]) -> None:
        keys: list[bytes] = []
        match = self.store.match(namespace, tokens, keys, self.now)
        table = self.store.adopt(namespace, tokens, keys, self.now)
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

    @rule(namespace=st.sampled_from([b"x", b"y", None]))
    def purge(self, namespace: bytes | None) -> None:
        self.store.purge(namespace)
        for name, _, _ in self.store.sessions.rows(self.now):
            held = {b for table, _ in self.open for group in table.blocks for b in group}
            assert namespace not in (None, name) or held, "something idle outlived its purge"

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check()
        assert self.store.audit(self.now) == 0
        for table, tokens in self.open:
            for blocks in table.blocks:
                assert len(blocks) == -(-len(tokens) // SIZE)
                for position in range(len(tokens)):
                    assert self.slots[blocks[position // SIZE]][position % SIZE] == hash(tuple(tokens[: position + 1]))

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for table, _ in self.open:
            self.store.release(table, self.now)
        self.store.purge()
        for _ in range(self.store.total):
            self.launch_and_apply()
        assert self.store.pool.free == self.store.total


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
