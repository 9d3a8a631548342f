"""Blocks and their states: FREE, HELD, IDLE, DIRTY; references and age.

Knows neither contents nor tables. Steps that were launched but not applied yet may still read or write the blocks they
name, so a block that leaves use carries a fence, the last step launched by then, and comes back into circulation only
when that step has been applied.

    FREE ── take ──▶ HELD ── drop, unsealed ──▶ FREE
                      ▲ │ drop, sealed
                 hold │ ▼
                     IDLE ── evict ──▶ FREE     IDLE ── soil ──▶ DIRTY ── wash, applied ──▶ FREE
                                                HELD ── drop, soil ──▲
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum


class State(Enum):
    """Where a block is in its life."""

    FREE = "free"
    HELD = "held"
    IDLE = "idle"
    DIRTY = "dirty"


class BlockPool:
    """`total` blocks, all FREE at first; `shared` counts those with more than one reference. Every operation is O(1)
    but repairs."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, got {total}")
        self.total = total
        self.refs = [0] * total
        self.states = [State.FREE] * total
        self.launched = 0
        self.applied = 0
        self.shared = 0
        self._free: list[int] = list(range(total - 1, -1, -1))
        self._cooling: deque[tuple[int, int]] = deque()
        self._idle: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._dirty: deque[int] = deque()
        self._washing: deque[tuple[int, int]] = deque()

    @property
    def free(self) -> int:
        """FREE blocks, cooling ones included."""
        return len(self._free) + len(self._cooling)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def dirty(self) -> int:
        return len(self._dirty) + len(self._washing)

    @property
    def held(self) -> int:
        return self.total - self.free - self.idle - self.dirty

    @property
    def ready(self) -> int:
        """FREE blocks that can be taken now."""
        return len(self._free)

    def take(self) -> int | None:
        """A FREE block becomes HELD with one reference; None when none is ready."""
        if not self._free:
            return None
        block = self._free.pop()
        self.refs[block] = 1
        self.states[block] = State.HELD
        return block

    def hold(self, block: int) -> None:
        """One more reference to a HELD or IDLE block."""
        state = self.states[block]
        if state is State.IDLE:
            del self._idle[block]
            self.states[block] = State.HELD
        elif state is not State.HELD:
            raise AssertionError(f"hold of block {block}, which is {state.value}")
        self.refs[block] += 1
        self.shared += self.refs[block] == 2

    def drop(self, block: int, *, sealed: bool, now: float, soil: bool = False) -> None:
        """One reference less; without any a sealed block turns IDLE, another FREE once its fence has passed, or DIRTY
        with `soil` (its zeroing comes after all that is in flight, so that it needs no fence)."""
        if self.states[block] is not State.HELD or self.refs[block] < 1:
            raise AssertionError(f"drop of block {block}, which is {self.states[block].value}")
        self.refs[block] -= 1
        self.shared -= self.refs[block] == 1
        if self.refs[block]:
            return
        if sealed:
            self.states[block] = State.IDLE
            self._idle[block] = (now, self.launched)
        elif soil:
            self.states[block] = State.DIRTY
            self._dirty.append(block)
        else:
            self._retire(block)

    def evictable(self) -> int | None:
        """The oldest IDLE block if no step in flight can still read it."""
        for block, (_, fence) in self._idle.items():
            return block if fence <= self.applied else None
        return None

    def evict(self, block: int) -> None:
        """IDLE → FREE, for a block that `evictable` named: its content is about to be overwritten."""
        del self._idle[block]
        self.states[block] = State.FREE
        self._free.append(block)

    def soil(self, block: int) -> None:
        """IDLE → DIRTY: its content must be zeroed before anybody gets it."""
        del self._idle[block]
        self.states[block] = State.DIRTY
        self._dirty.append(block)

    def wash(self, step: int, limit: int) -> tuple[int, ...]:
        """Up to `limit` DIRTY blocks for the zero list of plan `step`; they turn FREE when it has been applied."""
        blocks = tuple(self._dirty.popleft() for _ in range(min(limit, len(self._dirty))))
        self._washing.extend((step, block) for block in blocks)
        return blocks

    def launch(self, step: int) -> None:
        """Plan `step` is on its way to the ranks."""
        self.launched = step

    def apply(self, step: int) -> None:
        """The result of plan `step` is in: blocks fenced by it or earlier ones circulate again."""
        self.applied = step
        while self._cooling and self._cooling[0][0] <= step:
            self._free.append(self._cooling.popleft()[1])
        while self._washing and self._washing[0][0] <= step:
            block = self._washing.popleft()[1]
            self.states[block] = State.FREE
            self._free.append(block)

    def ready_blocks(self) -> tuple[int, ...]:
        """FREE blocks that can be taken now."""
        return tuple(self._free)

    def idle_blocks(self) -> Iterator[int]:
        """IDLE blocks, oldest first."""
        return iter(self._idle)

    def repair(self, block: int, refs: int) -> None:
        """Give a block `refs` references; one that has some comes out of where it stands and is HELD. O(blocks)."""
        self.shared += (refs > 1) - (self.refs[block] > 1)
        self.refs[block] = refs
        if self.states[block] is State.HELD:
            self.refs[block] = max(1, refs)  # the one left is for the `drop` that takes it out of use
        elif refs:
            self._pull(block)
            self.states[block] = State.HELD

    def check(self) -> None:
        """Every block is in exactly one place and in the state that the place means."""
        places = {
            State.FREE: [*self._free, *(b for _, b in self._cooling)],
            State.IDLE: list(self._idle),
            State.DIRTY: [*self._dirty, *(b for _, b in self._washing)],
        }
        seen: set[int] = set()
        for state, blocks in places.items():
            for block in blocks:
                assert block not in seen, f"block {block} is in two places"
                assert self.states[block] is state, f"block {block} is {self.states[block].value}, not {state.value}"
                assert self.refs[block] == 0, f"{state.value} block {block} has references"
                seen.add(block)
        assert self.shared == sum(refs > 1 for refs in self.refs), "shared blocks are miscounted"
        for block in range(self.total):
            if block not in seen:
                assert self.states[block] is State.HELD and self.refs[block] > 0, f"block {block} is lost"

    def _retire(self, block: int) -> None:
        self.states[block] = State.FREE
        if self.launched <= self.applied:
            self._free.append(block)
        else:
            self._cooling.append((self.launched, block))

    def _pull(self, block: int) -> None:
        for place in (self._free, self._dirty):
            if block in place:
                place.remove(block)
        for queue in (self._cooling, self._washing):
            kept = [item for item in queue if item[1] != block]
            queue.clear()
            queue.extend(kept)
        self._idle.pop(block, None)
