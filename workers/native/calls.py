"""Calls: kernels' calls with prepared arguments, and sequences of them that are recorded once and then run as one.

Between two kernels of a small model Python takes about as long as they do, and for each it has to get its lock back
from other threads. It knows no kernel and no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from workers.native.library import Library
from workers.native.workspace import Workspace

Result = TypeVar("Result")
_POINTER = ctypes.c_void_p
_MOST = 512
"""Recordings kept per owner, of some 20 KiB each: one for every number of tokens that steps have."""


class Call:
    """The C function `name` with `arguments`, a structure that its owner may change between calls."""

    def __init__(self, calls: Calls, name: str, arguments: ctypes.Structure) -> None:
        self._calls = calls
        self._name = name
        self._arguments = arguments
        self._address = ctypes.addressof(arguments)
        self._run = calls.library.function(name, _POINTER)

    def __call__(self) -> None:
        """Raises RuntimeError when the kernel refuses its arguments."""
        tape = self._calls.tape
        if tape is not None:
            tape.append((self._run, type(self._arguments).from_buffer_copy(self._arguments)))
        if code := self._run(self._address):
            raise RuntimeError(f"{self._name} refused its arguments (code {code})")


class _Step(ctypes.Structure):
    """TgCall of calls.cpp."""

    _fields_ = (("run", _POINTER), ("arguments", _POINTER))


Tape = list[tuple[Any, ctypes.Structure]]
"""C functions, each with its arguments as they were when it was called."""


class _Recording:
    """What a tape holds, as one call. `parts` and `result` live as long as it does."""

    def __init__(self, library: Library, tape: Tape, parts: Sequence[object], result: object) -> None:
        self.result = result
        self._held = (tape, parts)  # the addresses below are theirs
        steps = (_Step(ctypes.cast(run, _POINTER).value, ctypes.addressof(arguments)) for run, arguments in tape)
        self._steps = (_Step * len(tape))(*steps)
        self._run = library.function("tg_run", _POINTER, ctypes.c_int64)

    def run(self) -> None:
        """Raises RuntimeError when a kernel refuses its arguments."""
        if code := self._run(self._steps, len(self._steps)):
            raise RuntimeError(f"a recorded kernel refused its arguments (code {code})")


class Calls:
    """Calls into `library` for one rank, whose kernels write to `workspace`; `tape` takes them while one records."""

    def __init__(self, library: Library, workspace: Workspace) -> None:
        self.library = library
        self.workspace = workspace
        self.tape: Tape | None = None
        self._generation = workspace.generation
        self._recordings: WeakKeyDictionary[object, dict[tuple[int, ...], _Recording]] = WeakKeyDictionary()

    def replay(self, owner: object, parts: tuple[object, ...], work: Callable[[], Result]) -> Result:
        """What `work` gives; it is called only where it has not been before for this `owner` and these `parts`. Else
        the kernels that it called then run again.

        So `work` does nothing but call kernels, always the same ones in memory of the owner, the parts or the
        workspace, and gives one of the parts or a buffer of the workspace.
        """
        kept = self._kept(owner)
        key = tuple(map(id, parts))
        if found := kept.get(key):
            found.run()
            result: Result = found.result  # type: ignore[assignment]
            return result
        tape: Tape = []
        self.tape = tape
        try:
            result = work()
        finally:
            self.tape = None
        if self._generation == self.workspace.generation and len(kept) < _MOST:
            kept[key] = _Recording(self.library, tape, parts, result)
        return result

    def _kept(self, owner: object) -> dict[tuple[int, ...], _Recording]:
        """The owner's recordings: none where the workspace has moved since."""
        if self._generation != self.workspace.generation:
            self._recordings.clear()
            self._generation = self.workspace.generation
        return self._recordings.setdefault(owner, {})
