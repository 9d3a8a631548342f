"""Which block holds which content: key → block, and back. Prefix-closed: an indexed block's parent is indexed.

Knows keys and block ids only; who holds a block, and for how long, is the pool's and the store's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.chain import BlockKey


@dataclass(frozen=True, slots=True)
class Entry:
    """One indexed block: its layer group, its key and its parent's, its tokens, the namespace that shares it, and a
    number for the same prefix in any namespace (`open_hash`)."""

    group: int
    key: BlockKey
    parent: BlockKey | None
    tokens: tuple[int, ...]
    namespace: bytes
    open_hash: int = 0


class PrefixIndex:
    """A two-way map between (layer group, key) and block."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, BlockKey], int] = {}
        self._entries: dict[int, Entry] = {}
        self._children: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def find(self, group: int, key: BlockKey, tokens: tuple[int, ...]) -> int | None:
        """The block with this content. The tokens are compared too: a hash alone is never trusted."""
        block = self._blocks.get((group, key))
        if block is None or self._entries[block].tokens != tokens:
            return None
        return block

    def block(self, group: int, key: BlockKey) -> int | None:
        """The block with this key, whatever its tokens."""
        return self._blocks.get((group, key))

    def entry(self, block: int) -> Entry:
        return self._entries[block]

    def parent(self, entry: Entry) -> int | None:
        """The block that `entry` follows; None for a first one."""
        return None if entry.parent is None else self._blocks.get((entry.group, entry.parent))

    def children(self, block: int) -> int:
        """How many indexed blocks follow this one."""
        return self._children.get(block, 0)

    def add(self, block: int, entry: Entry) -> None:
        place = (entry.group, entry.key)
        assert place not in self._blocks and block not in self._entries, f"block {block} is indexed twice"
        self._blocks[place] = block
        self._entries[block] = entry
        parent = self.parent(entry)
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1

    def remove(self, block: int) -> Entry:
        entry = self._entries.pop(block)
        del self._blocks[entry.group, entry.key]
        self._children.pop(block, None)
        parent = self.parent(entry)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
        return entry

    def closure(self, blocks: set[int]) -> set[int]:
        """`blocks` and all that follows them, in whatever namespace."""
        found = set(blocks)
        inside = sum(self.parent(self._entries[block]) in found for block in blocks)
        if sum(self.children(block) for block in blocks) == inside:
            return found
        while more := {b for b, entry in self._entries.items() if b not in found and self.parent(entry) in found}:
            found |= more
        return found

    def items(self) -> Iterator[tuple[int, Entry]]:
        return iter(self._entries.items())

    def check(self) -> None:
        """Both directions agree, every parent is indexed, and children are counted rightly."""
        assert len(self._blocks) == len(self._entries)
        children: Counter[int] = Counter()
        for block, entry in self._entries.items():
            assert self._blocks[entry.group, entry.key] == block
            if entry.parent is not None:
                assert (entry.group, entry.parent) in self._blocks, f"block {block} is indexed without its parent"
                children[self._blocks[entry.group, entry.parent]] += 1
        assert self._children == dict(children), "children are miscounted"
