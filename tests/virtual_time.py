"""An event loop whose clock jumps to the next timer instead of waiting for it: time in tests that costs none."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.SelectSelector):
    """Selects without waiting; what it was to wait is added to `now`."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that never comes"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """For coroutines that wait for timers and for each other only: no thread and no socket moves its clock."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run; no task may be left behind."""

    async def main() -> Result:
        result = await work
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, "tasks were left behind"
        return result

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
