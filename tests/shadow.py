"""Shadow ranks: a Group without tensors whose slots hold a digest of the whole prefix, read through the block table.

A wrong block, slot, copy, early seal or stale hit changes the tokens that come out, which an oracle knows from the
token ids alone. Misuse that a real rank could not notice (a slot written by two rows, a read of a slot that nobody
wrote) raises at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from workers.plan import PENDING, Draw, Row, StepPlan, StepResult

ROOT = 0x1234567


def digest(parent: int, token: int) -> int:
    return hash((parent, token, 77))


def draw_token(folded: int, draw: Draw, vocabulary: int) -> int:
    seed = draw.seed if draw.temperature > 0 else 0
    return hash((folded, seed, draw.position)) % vocabulary


def expected_output(
    prompt: tuple[int, ...], count: int, draw: Draw, vocabulary: int, stop: frozenset[int]
) -> list[int]:
    """The oracle: what a request must get, from its tokens alone."""
    tokens, folded, parent = list(prompt), 0, ROOT
    for token in tokens:
        parent = digest(parent, token)
        folded = hash((folded, parent))
    output: list[int] = []
    while len(output) < count:
        token = draw_token(folded, Draw(draw.temperature, seed=draw.seed, position=len(tokens)), vocabulary)
        output.append(token)
        tokens.append(token)
        parent = digest(parent, token)
        folded = hash((folded, parent))
        if token in stop:
            break
    return output


class ShadowGroup:
    """`blocks` blocks of `block_size` slots. `short` says of a plan with rows whether a rank finds no memory for it
    (`drops` counts those); `forgiving`: slots that nobody wrote may be read, for a replay that begins in the middle."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        vocabulary: int = 97,
        short: Callable[[StepPlan], bool] | None = None,
        forgiving: bool = False,
    ) -> None:
        self.block_size = block_size
        self.drops = 0
        self._short = short
        self._forgiving = forgiving
        self.vocabulary = vocabulary
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(blocks)]
        self.steps = 0
        self._previous: tuple[int, ...] = ()
        self._results: deque[StepResult] = deque()
        self._inflight: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> object:
        assert plan.step == self.steps + 1, "plans must be launched in order"
        self.steps = plan.step
        self._check_circulation(plan)
        self._inflight.append(plan)
        result = self._step(plan)
        self._results.append(result)
        return result

    def wait(self, handle: object) -> StepResult:
        assert self._results and self._results[0] is handle, "results must be awaited in order"
        self._inflight.popleft()
        return self._results.popleft()

    def named(self) -> set[int]:
        """Blocks that plans in flight name: they must stay out of circulation."""
        plans = self._inflight
        rows = {block for plan in plans for row in plan.rows for table in row.tables for block in table}
        return rows | {block for plan in plans for pair in plan.copy for block in pair}

    def _check_circulation(self, plan: StepPlan) -> None:
        """A block that a plan in flight names may be written by the same sequence only: at the same place in it."""
        places: dict[int, set[int]] = {}
        for row in (row for flight in self._inflight for row in flight.rows):
            for table in row.tables:
                for place, block in enumerate(table):
                    places.setdefault(block, set()).add(place)
        for row in plan.rows:
            for table in row.tables:
                for place in range(row.start // self.block_size, len(table)):
                    known = places.get(table[place])
                    assert known is None or place in known, f"block {table[place]} changed hands while in flight"

    def _step(self, plan: StepPlan) -> StepResult:
        for (_, target), slots in [(pair, list(self.slots[pair[0]])) for pair in plan.copy]:
            self.slots[target] = slots
        for block in plan.zero:
            self.slots[block] = [None] * self.block_size
        if plan.rows and plan.drops < self.drops:
            self._previous = ()
            return StepResult(plan.step, (), dropped=True)
        if plan.rows and self._short and self._short(plan):
            self.drops += 1
            self._previous = ()
            return StepResult(plan.step, (), dropped=True, short=True)
        return StepResult(plan.step, self._run(plan))

    def _run(self, plan: StepPlan) -> tuple[int, ...]:
        self._check_writes(plan)
        sampled = []
        for row in plan.rows:
            token = self._run_row(row)
            if row.draw is not None:
                sampled.append(token)
        self._previous = tuple(sampled)
        return self._previous

    def _check_writes(self, plan: StepPlan) -> None:
        written: set[int] = set()
        for row in plan.rows:
            stop = row.start + len(row.tokens)
            assert row.tokens, "a row computes nothing: its logits would be nobody's"
            for table in row.tables:
                assert len(table) == -(-stop // self.block_size), "the table does not cover the row"
                assert len(set(table)) == len(table), "a block stands twice in a table"
            mine = {table[p // self.block_size] for table in row.tables for p in range(row.start, stop)}
            assert not mine & written, "two rows write the same block"
            written |= mine
        for row in plan.rows:
            for table in row.tables:
                head = set(table[: row.start // self.block_size])
                assert not head & written, "a row writes into a block that another reads"

    def _run_row(self, row: Row) -> int:
        tokens = row.tokens
        if PENDING in tokens:
            assert tokens == (PENDING,) and row.source is not None
            tokens = (self._previous[row.source],)
        outcomes = {self._run_table(row, tokens, table) for table in row.tables}
        assert len(outcomes) == 1, "layer groups disagree"
        return outcomes.pop()

    def _run_table(self, row: Row, tokens: tuple[int, ...], table: tuple[int, ...]) -> int:
        size = self.block_size
        parent = self._read(table, row.start - 1) if row.start else ROOT
        for offset, token in enumerate(tokens):
            position = row.start + offset
            parent = digest(parent, token)
            self.slots[table[position // size]][position % size] = parent
        if row.draw is None:
            return 0
        folded = 0
        for position in range(row.start + len(tokens)):
            folded = hash((folded, self._read(table, position)))
        return draw_token(folded, row.draw, self.vocabulary)

    def _read(self, table: tuple[int, ...], position: int) -> int:
        value = self.slots[table[position // self.block_size]][position % self.block_size]
        assert value is not None or self._forgiving, f"position {position} is read before it was written"
        return value or 0
