"""Shadow ranks: a Group without tensors whose slots hold a token and a digest of the whole prefix up to it, read
through the block table.

A wrong block, slot, copy, early seal or stale hit breaks the chain of digests, or changes the tokens that come out,
which an oracle knows from the token ids alone. Misuse that a real rank could not notice (a slot written by two rows, a
read of a slot that nobody wrote, or that the window had let go of) raises at once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from kvstore.layout import OPEN_WINDOW
from kvstore.table import GONE
from workers.logprobs import Logprobs, TokenLogprobs, pack
from workers.plan import PENDING, Bend, Draw, Penalties, Row, StepPlan, StepResult

ROOT = 0x1234567


def digest(parent: int, token: int) -> int:
    return hash((parent, token, 77))


def draw_token(prefix: int, draw: Draw, vocabulary: int) -> int:
    """What was said so far matters to a draw with penalties, and what is banned is not drawn."""
    seed = draw.seed if draw.temperature > 0 else 0
    if draw.bend is None:
        return hash((prefix, seed, draw.position)) % vocabulary
    assert PENDING not in draw.bend.output, "a token that was drawn is not known yet"
    drawn = (hash((prefix, seed, draw.position, draw.bend, turn)) % vocabulary for turn in itertools.count())
    return next(token for token in drawn if token not in draw.bend.banned)


def logprobs_of(prefix: int, token: int, top: int) -> TokenLogprobs:
    """What a shadow rank says of `token` behind that prefix: numbers that fp32 holds exactly."""
    likeliest = tuple((hash((prefix, place)) % 97, -0.5 - place) for place in range(top))
    return TokenLogprobs(-(hash((prefix, token)) % 4096) / 64, likeliest)


def expected_logprobs(tokens: tuple[int, ...], top: int) -> list[TokenLogprobs]:
    """The oracle: of each token of a sequence but its first."""
    parent, told = digest(ROOT, tokens[0]), []
    for token in tokens[1:]:
        told.append(logprobs_of(parent, token, top))
        parent = digest(parent, token)
    return told


def expected_output(
    prompt: tuple[int, ...],
    count: int,
    draw: Draw,
    vocabulary: int,
    stop: frozenset[int],
    penalties: Penalties | None = None,
) -> list[int]:
    """The oracle: what a request must get, from its tokens alone."""
    tokens, parent = list(prompt), ROOT
    for token in tokens:
        parent = digest(parent, token)
    output: list[int] = []
    while len(output) < count:
        bend = None
        if penalties is not None:
            distinct = tuple(dict.fromkeys(prompt)) if penalties.repetition != 1.0 else ()
            banned = tuple(stop) if len(output) < penalties.min_tokens else ()
            said = tuple(output) if penalties.look_back else ()
            bend = Bend(penalties, distinct, said, banned)
        now = Draw(draw.temperature, seed=draw.seed, position=len(tokens), bend=bend)
        token = draw_token(parent, now, vocabulary)
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
        return self._run(plan)

    def _run(self, plan: StepPlan) -> StepResult:
        self._check_writes(plan)
        sampled, logprobs, scores = [], [], []
        for row in plan.rows:
            if PENDING in row.tokens:
                assert row.tokens == (PENDING,) and row.source is not None
                row = row.filled(self._previous[row.source])
            prefixes = self._run_row(row)
            if row.draw is not None:
                sampled.append(draw_token(prefixes[-1], row.draw, self.vocabulary))
                logprobs.append(_drawn(prefixes[-1], sampled[-1], row.draw))
            if row.score is not None:
                first, last = row.score.first - row.start, row.score.first - row.start + len(row.score.targets)
                assert 0 <= first < last <= len(prefixes), "a score of tokens that the row does not compute"
                places = zip(prefixes[first:last], row.score.targets, strict=True)
                told = [logprobs_of(prefix, target, row.score.top) for prefix, target in places]
                scores.append(pack(told, row.score.top))
        self._previous = tuple(sampled)
        asked = tuple(logprobs) if any(one is not None for one in logprobs) else ()
        return StepResult(plan.step, self._previous, logprobs=asked, scores=tuple(scores))

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

    def _run_row(self, row: Row) -> tuple[int, ...]:
        """The digests of the prefixes that end with each of its tokens."""
        both = zip(row.tables, self._windows, strict=True)
        outcomes = {self._run_table(row, row.tokens, table, window) for table, window in both}
        assert len(outcomes) == 1, "layer groups disagree"
        return outcomes.pop()

    def _run_table(
        self, row: Row, tokens: tuple[int, ...], table: tuple[int, ...], window: int | None
    ) -> tuple[int, ...]:
        """What each query sees must be one chain. A window of one token is that of open blocks, of which a query reads
        its own: the digest of what came before is taken from wherever it still lies."""
        size = self.block_size
        first = 0 if window is None else max(0, row.start - window + 1)
        if window == OPEN_WINDOW:
            first = row.start // size * size
        parent = ROOT
        if row.start:
            parent = self._check_chain(table, first, row.start) if first < row.start else self._prefix(row)
        prefixes = []
        for offset, token in enumerate(tokens):
            position = row.start + offset
            parent = digest(parent, token)
            self.slots[table[position // size]][position % size] = (token, parent)
            prefixes.append(parent)
        return tuple(prefixes)

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


def _drawn(prefix: int, token: int, draw: Draw) -> Logprobs | None:
    return None if draw.top is None else pack([logprobs_of(prefix, token, draw.top)], draw.top)
