"""BlockTable: the blocks of one sequence, and to which namespace each of them belongs. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.chain import BlockKey
from kvstore.sessions import Terms

GONE = -1
"""In a table: a block that was let go of, because no token to come will see what it held."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, per layer group; `keys` are those of its first full blocks, `sealed` how many of them
    have been offered to the index, `cached` the tokens it found there when it was opened. The first `public` blocks
    belong to `terms.public`, the others to `namespace`. `forgotten`: its namespace was purged since, so that nothing of
    it may be found by others. `audited` is the audit's pass that counts it.

    In a layer group with a window, the first `gone[group]` blocks are GONE."""

    namespace: bytes
    blocks: tuple[list[int], ...]
    terms: Terms
    public: int
    keys: list[BlockKey] = field(default_factory=list)
    sealed: int = 0
    cached: int = 0
    forgotten: bool = False
    audited: int = 0
    gone: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gone = self.gone or [sum(block == GONE for block in blocks) for blocks in self.blocks]

    @property
    def held(self) -> int:
        """Blocks of all layer groups that it has."""
        return sum(map(len, self.blocks)) - sum(self.gone)

    def live(self, group: int) -> list[int]:
        """The blocks of a layer group that it has, from its head on."""
        gone = self.gone[group]
        return self.blocks[group][gone:] if gone else self.blocks[group]

    def owner(self, index: int) -> bytes:
        """The namespace of the block at `index`."""
        return self.terms.public if index < self.public else self.namespace
