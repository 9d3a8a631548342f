"""Mounted files that nobody else may see: the tenants with their keys, and the secrets of the cache's namespaces.

The file of keys is read again and again, so that a revoked key is refused within seconds. Its bytes are compared, not
its times: that also sees a link that was turned to another file, as Kubernetes does, and a copy that kept its time. A
broken file changes nothing and is said once. Keys and hashes are never logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from cluster.documents import DocumentError
from cluster.tenants import KeyRing, Tenant

CHECK_S = 2.0
"""How often the file is looked at."""
LEAST_SECRET_BYTES = 16

log = logging.getLogger("tidegate.ingress")


class KeyFile:
    """`ring` is the last that could be read. What a tenant leaves out is as in `defaults`."""

    def __init__(self, path: Path, defaults: Tenant) -> None:
        """Reads it. Raises DocumentError when it cannot be read or is wrong: without keys nothing starts."""
        self._path = path
        self._defaults = defaults
        self._seen: bytes | str = b""
        try:
            self._seen = path.read_bytes()
        except OSError as error:
            raise DocumentError(f"{path}: cannot be read: {error.strerror}") from None
        self.ring = self._read(self._seen)

    def refresh(self) -> None:
        """Take in the file if it is another than before."""
        try:
            now: bytes | str = self._path.read_bytes()
        except OSError as error:
            now = f"cannot be read: {error.strerror}"
        if now == self._seen:
            return
        self._seen = now
        if isinstance(now, str):
            log.error("the API keys stay as they are, %s %s", self._path, now)
            return
        try:
            self.ring = self._read(now)
        except DocumentError as error:
            log.error("the API keys stay as they are: %s", error)
        else:
            log.info("the API keys were read anew from %s: %d tenants", self._path, len(self.ring.tenants))

    async def look(self) -> None:
        """Refresh, off the event loop; whatever goes wrong, the keys stay."""
        try:
            await asyncio.to_thread(self.refresh)
        except Exception as error:  # whatever it is: to watch on matters more
            log.error("the API keys stay as they are: %s", type(error).__name__)

    def _read(self, content: bytes) -> KeyRing:
        try:
            return KeyRing.read(content.decode("utf-8"), self._defaults)
        except UnicodeDecodeError as error:
            raise DocumentError(f"{self._path}: not UTF-8 at byte {error.start}") from None
        except DocumentError as error:
            raise DocumentError(f"{self._path}: {error}") from None


def read_secrets(files: Iterable[str]) -> tuple[bytes, ...]:
    """The bytes of each file, as they are. Raises ValueError for one that is too short to be a secret, OSError for one
    that cannot be read."""
    found = []
    for file in files:
        secret = Path(file).read_bytes()
        if len(secret) < LEAST_SECRET_BYTES:
            least = f"at least {LEAST_SECRET_BYTES} random ones"
            raise ValueError(f"{file} keys the cache's namespaces and holds {len(secret)} bytes: it takes {least}")
        found.append(secret)
    return tuple(found)
