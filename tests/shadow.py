"""Shadow ranks: a Group without tensors whose slots hold a token and a digest of the whole prefix up to it, read
through the block table.

A wrong block, slot, copy, early seal or stale hit breaks the chain of digests, or changes the tokens that come out,
which an oracle knows from the token ids alone. Misuse that a real rank could not notice (a slot written by two rows, a
read of a slot that nobody wrote, or that the window had let go of) raises at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvstore.layout import OPEN_WINDOW
from kvstore.table import GONE
from workers.plan import PENDING, Draw, Row, StepPlan, StepResult

ROOT = 0x1234567


def digest(parent: int, token: int) -> int:
    return hash((parent, token, 77))


def draw_token(prefix: int, draw: Draw, vocabulary: int) -> int:
    seed = draw.seed if draw.temperature > 0 else 0
    return hash((prefix, seed, draw.position)) % vocabulary


def expected_output(
    prompt: tuple[int, ...], count: int, draw: Draw, vocabulary: int, stop: frozenset[int]
) -> list[int]:
    """The oracle: what a request must get, from its tokens alone."""
    tokens, parent = list(prompt), ROOT
    for token in tokens:
        parent = digest(parent, token)
    output: list[int] = []
    while len(output) < count:
        token = draw_token(parent, Draw(draw.temperature, seed=draw.seed, position=len(tokens)), vocabulary)
        output.append(token)
        tokens.append(token)
        parent = digest(parent, token)
        if token in stop:
            break
    return output


class ShadowGroup:
    """`blocks` blocks of `block_size` slots, for layer groups with `windows`. `short` says of a plan with rows whether
    a rank finds no memory for it (`drops` counts those); `forgiving`: slots that nobody wrote may be read, for a replay
    that begins in the middle."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        windows: tuple[int | None, ...] = (None,),
        vocabulary: int = 97,
        short: Callable[[StepPlan], bool] | None = None,
        forgiving: bool = False,
    ) -> None:
        self.block_size = block_size
        self.drops = 0
        self._short = short
        self._forgiving = forgiving
        self.vocabulary = vocabulary
        self._windows = windows
        self.slots: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(blocks)]
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
        return (rows - {GONE}) | {block for plan in plans for pair in plan.copy for block in pair}

    def _check_circulation(self, plan: StepPlan) -> None:
        """A block that a plan in flight names may be written by the same sequence only: at the same place in it."""
        places: dict[int, set[int]] = {}
        for row in (row for flight in self._inflight for row in flight.rows):
            for table in row.tables:
                for place, block in enumerate(table):
                    if block != GONE:
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
                live = [block for block in table if block != GONE]
                assert len(set(live)) == len(live), "a block stands twice in a table"
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
        both = zip(row.tables, self._windows, strict=True)
        outcomes = {self._run_table(row, tokens, table, window) for table, window in both}
        assert len(outcomes) == 1, "layer groups disagree"
        return outcomes.pop()

    def _run_table(self, row: Row, tokens: tuple[int, ...], table: tuple[int, ...], window: int | None) -> int:
        """What each query sees must be one chain. A window of one token is that of open blocks, of which a query reads
        its own: the digest of what came before is taken from wherever it still lies."""
        size = self.block_size
        first = 0 if window is None else max(0, row.start - window + 1)
        if window == OPEN_WINDOW:
            first = row.start // size * size
        parent = ROOT
        if row.start:
            parent = self._check_chain(table, first, row.start) if first < row.start else self._prefix(row)
        for offset, token in enumerate(tokens):
            position = row.start + offset
            parent = digest(parent, token)
            self.slots[table[position // size]][position % size] = (token, parent)
        return 0 if row.draw is None else draw_token(parent, row.draw, self.vocabulary)

    def _prefix(self, row: Row) -> int:
        """The digest of what lies before `row`, from a table that still has it."""
        place, offset = divmod(row.start - 1, self.block_size)
        blocks = [table[place] for table in row.tables if table[place] != GONE]
        slot = self.slots[blocks[0]][offset] if blocks else None
        assert slot is not None or self._forgiving, "nothing is left of what lies before a row"
        return slot[1] if slot else 0

    def _check_chain(self, table: tuple[int, ...], first: int, stop: int) -> int:
        """The digest of the last of positions [first, stop), whose digests must follow from each other."""
        before: int | None = None if first else ROOT
        for position in range(first, stop):
            block = table[position // self.block_size]
            assert block != GONE, f"position {position} is read after it was let go of"
            slot = self.slots[block][position % self.block_size]
            assert slot is not None or self._forgiving, f"position {position} is read before it was written"
            if slot is None:
                before = 0
                continue
            token, found = slot
            assert before is None or self._forgiving or found == digest(before, token), f"position {position} is wrong"
            before = found
        assert before is not None
        return before
