"""What groups say while they come up, kept for whoever waits for them. Plain values; knows no actor and no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

KEPT = 256
"""Notices that are kept; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One line of news about `group`. `failed`: it did not come up, and `text` says why in words for the operator."""

    number: int
    group: str
    text: str
    failed: bool = False


class NoticeBoard:
    """Notices in the order they came, numbered from 1."""

    def __init__(self) -> None:
        self._notices: deque[Notice] = deque(maxlen=KEPT)
        self.last = 0

    def post(self, group: str, text: str, failed: bool) -> None:
        """Add one."""
        self.last += 1
        self._notices.append(Notice(self.last, group, text, failed))

    def after(self, number: int) -> tuple[Notice, ...]:
        """Those that came after notice `number`."""
        return tuple(notice for notice in self._notices if notice.number > number)
