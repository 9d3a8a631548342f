"""Which block holds which content: key → block, and back. Prefix-closed: an indexed block's parent is indexed.

Knows keys and block ids only; who holds a block, and for how long, is the pool's and the store's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.chain import BlockKey


@dataclass(frozen=True, slots=True)
class Entry:
    """One indexed block: its layer group, its key and its parent's, its tokens, and the namespace that shares it."""

    group: int
    key: BlockKey
    parent: BlockKey | None
    tokens: tuple[int, ...]
    namespace: bytes


class PrefixIndex:
    """A two-way map between (layer group, key) and block."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, BlockKey], int] = {}
        self._entries: dict[int, Entry] = {}

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

    def occupied(self, group: int, key: BlockKey) -> bool:
        """Whether some block has this key, whatever its tokens."""
        return (group, key) in self._blocks

    def entry(self, block: int) -> Entry:
        return self._entries[block]

    def add(self, block: int, entry: Entry) -> None:
        place = (entry.group, entry.key)
        assert place not in self._blocks and block not in self._entries, f"block {block} is indexed twice"
        self._blocks[place] = block
        self._entries[block] = entry

    def remove(self, block: int) -> Entry:
        entry = self._entries.pop(block)
        del self._blocks[entry.group, entry.key]
        return entry

    def items(self) -> Iterator[tuple[int, Entry]]:
        return iter(self._entries.items())

    def check(self) -> None:
        """Both directions agree, and every parent is indexed."""
        assert len(self._blocks) == len(self._entries)
        for block, entry in self._entries.items():
            assert self._blocks[entry.group, entry.key] == block
            if entry.parent is not None:
                assert (entry.group, entry.parent) in self._blocks, f"block {block} is indexed without its parent"
