"""Segment: a piece of memory that processes of one machine share, and a watch on who shares it. It knows no collective.

The memory has no name in any file system: it is gone with the last process that maps it, however that ends. Others open
it through the maker's entry in /proc, so it needs Linux, one user and one PID namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import secrets
from pathlib import Path

_NAME_BYTES = 16
_FILE = "tidegate"


class NotShared(Exception):
    """This process cannot have or reach the memory; the message says why in one line."""


class Segment:
    """`size` bytes, zeros at first, behind `memory`. The first 64 are this class's own."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(descriptor, size)
        self._descriptor: int | None = descriptor

    @classmethod
    def make(cls, size: int) -> Segment:
        """A new one. Raises NotShared where the system has no such memory."""
        if not hasattr(os, "memfd_create"):
            raise NotShared("this system has no anonymous shared memory")
        try:
            descriptor = os.memfd_create(_FILE, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size)
            # Whoever shares it may rely on its size.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            made = cls(descriptor, size)
        except OSError as error:
            raise NotShared(f"shared memory cannot be made: {error}") from error
        made.memory[:_NAME_BYTES] = secrets.token_bytes(_NAME_BYTES)
        return made

    @classmethod
    def join(cls, invitation: bytes) -> Segment:
        """The one that another process's `invitation` tells of. Raises NotShared when it is out of reach."""
        told = json.loads(invitation)
        if told["space"] != process_space():
            raise NotShared("the ranks are on different hosts, or in containers that do not see each other's processes")
        path = Path(f"/proc/{told['pid']}/fd/{told['descriptor']}")
        try:
            # Looked at first: opening something else may have effects.
            if not os.readlink(path).startswith(f"/memfd:{_FILE}"):
                raise NotShared("rank 0's process is not the one that made the shared memory")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotShared(f"rank 0's shared memory cannot be opened: {error}") from error
        if os.fstat(descriptor).st_size != told["size"]:
            os.close(descriptor)
            raise NotShared("rank 0's shared memory has another size than it says")
        joined = cls(descriptor, told["size"])
        joined.let_go()
        if bytes(joined.memory[:_NAME_BYTES]).hex() != told["name"]:
            raise NotShared("rank 0's shared memory is not the one it tells of")
        return joined

    def invitation(self) -> bytes:
        """What another process needs for `join`, while this one keeps the descriptor."""
        name = bytes(self.memory[:_NAME_BYTES]).hex()
        place = {"space": process_space(), "pid": os.getpid(), "descriptor": self._descriptor}
        return json.dumps({**place, "name": name, "size": self.size}).encode()

    def let_go(self) -> None:
        """Close the descriptor: nobody else can join from now on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Watch:
    """A descriptor that can be read from once process `pid` has ended, whatever becomes of its number; -1 for this
    process itself. Raises NotShared where the system has none, ProcessLookupError when there is no such process."""

    def __init__(self, pid: int) -> None:
        self.descriptor = -1
        if not hasattr(os, "pidfd_open"):
            raise NotShared("this system cannot watch processes")
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise NotShared(f"processes cannot be watched: {error}") from error
        if pid == os.getpid():
            os.close(descriptor)
        else:
            self.descriptor = descriptor

    def __del__(self) -> None:
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1


def process_space() -> str:
    """Within it process numbers mean the same: the machine since it was started, and the PID namespace on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        raise NotShared(f"/proc cannot be read: {error}") from error
