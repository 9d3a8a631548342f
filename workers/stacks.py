"""Stacks: where each thread of this process is, in Python's terms. Read when a group has stopped or died."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass

_FRAMES = 40
"""Innermost frames that are kept of a thread."""


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread: its name and its frames as `file:line function: code`, the innermost last."""

    thread: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankState:
    """How far a rank has come: `step` is the last plan that reached it, `drops` how many steps it has dropped for want
    of memory, `collectives` how many it has begun and `collective` the latest. A rank that the others wait for is
    behind them."""

    rank: int
    pid: int
    step: int
    drops: int
    collectives: int
    collective: str
    stacks: tuple[ThreadStack, ...]


def thread_stacks() -> tuple[ThreadStack, ...]:
    """All threads of this process but the one that asks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return tuple(
        ThreadStack(names.get(ident, str(ident)), _frames(traceback.extract_stack(frame, _FRAMES)))
        for ident, frame in sys._current_frames().items()
        if ident != own
    )


def _frames(stack: traceback.StackSummary) -> tuple[str, ...]:
    return tuple(f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in stack)
