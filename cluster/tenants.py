"""Tenants and their API keys: who may ask for what, and whose key is whose. Knows no file, no clock and no HTTP.

Only hashes of keys are kept. A plain SHA-256 is enough because keys are random (256 bits from `make_key`): there is
nothing to guess, so nothing that a slow hash would make slower.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from cluster.coordination.grants import Share
from cluster.documents import DocumentError, Entry, read
from workers.sequence import Priority

MAX_KEY_CHARS = 512
HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
NO_HASH = (
    "must be sha256: and 64 hex digits: the hash of a key, never the key. `tidegate keys new` makes both; "
    "for a key that there is: printf %s KEY | sha256sum"
)
CLASSES = {"interactive": Priority.INTERACTIVE, "batch": Priority.BATCH}


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks. `weight` is its part of the service while several wait, `max_waiting` how many of its requests may
    stand in the line; `best_urgency` is the lowest `priority` that its requests get; `models` are names of the models
    it may use (None: all). `session_blocks` and `tenant_blocks` bound its cache (None: no bound), `max_keep_s` how long
    it may have a session kept."""

    name: str = "default"
    weight: float = 1.0
    max_waiting: int = 512
    best_urgency: int = 0
    classes: frozenset[Priority] = frozenset(Priority)
    models: frozenset[str] | None = None
    session_blocks: int | None = None
    tenant_blocks: int | None = None
    max_keep_s: float = 3600.0

    @property
    def share(self) -> Share:
        """What the coordinator is told of it."""
        return Share(self.name, self.weight, self.max_waiting)

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether it may use the model that is called so: one of the names is enough."""
        return self.models is None or not self.models.isdisjoint(names)


@dataclass(frozen=True, slots=True)
class Key:
    """Whose key it is, and until when (seconds since 1970; None: for good)."""

    tenant: Tenant
    expires: float | None = None


class KeyRing:
    """All tenants and the hashes of their keys. Never changes; a new file makes a new one."""

    def __init__(self, tenants: tuple[Tenant, ...], keys: dict[bytes, Key]) -> None:
        """`keys` by SHA-256 digest."""
        self.tenants = tenants
        self._keys = keys

    @classmethod
    def read(cls, text: str, defaults: Tenant) -> KeyRing:
        """From a YAML or JSON text; what a tenant leaves out is as in `defaults`. Raises DocumentError with the path of
        the fault in the text."""
        tenants: dict[str, Tenant] = {}
        keys: dict[bytes, Key] = {}
        for index, entry in enumerate(read(text, _File).tenants):
            if entry.name in tenants:
                raise DocumentError(f"tenants[{index}].name: there are two tenants called {entry.name}")
            tenant = tenants[entry.name] = entry.tenant(defaults)
            for place, key in enumerate(entry.keys):
                digest = bytes.fromhex(key.hash.removeprefix("sha256:"))
                if digest in keys:
                    raise DocumentError(f"tenants[{index}].keys[{place}]: this key stands in the file a second time")
                keys[digest] = Key(tenant, key.expires.timestamp() if key.expires else None)
        return cls(tuple(tenants.values()), keys)

    def tenant_of(self, key: str, now: float) -> Tenant | None:
        """Whose key it is; None when it is nobody's or, at `now` (seconds since 1970), has expired.

        It is looked up by its digest, which nobody can steer towards another key's: how long that takes tells nothing.
        """
        if not 0 < len(key) <= MAX_KEY_CHARS:
            return None
        found = self._keys.get(_digest(key))
        if found is None or (found.expires is not None and now >= found.expires):
            return None
        return found.tenant


def make_key(entropy: bytes) -> tuple[str, str]:
    """A new key for a client, and its hash for the file. `entropy`: at least 32 random bytes, from a secure source."""
    if len(entropy) < 32:
        raise ValueError("a key takes at least 32 random bytes")
    key = "tg-" + base64.urlsafe_b64encode(entropy).decode().rstrip("=")
    return key, hash_of(key)


def hash_of(key: str) -> str:
    """How a key stands in the file."""
    return f"sha256:{_digest(key).hex()}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _key(value: object) -> object:
    """A key may stand as its hash alone."""
    return {"hash": value} if isinstance(value, str) else value


def _hash(value: object) -> object:
    if not (isinstance(value, str) and HASH.fullmatch(value)):
        raise PydanticCustomError("hash", NO_HASH)
    return value.lower()


def _time(value: object) -> object:
    if isinstance(value, bool | int | float):
        raise PydanticCustomError("time", "must be a time with its zone, as 2027-01-31T00:00:00Z")
    return value


Blocks = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$")]


class _Key(Entry):
    hash: Annotated[str, BeforeValidator(_hash)]
    expires: Annotated[AwareDatetime, BeforeValidator(_time), Field(strict=False)] | None = None


class _Tenant(Entry):
    name: Name
    weight: Annotated[float, Field(gt=0, le=1000)] | None = None
    max_waiting: Annotated[int, Field(ge=0)] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    classes: Annotated[list[Literal["interactive", "batch"]], Field(min_length=1)] | None = None
    models: list[str] | None = None
    session_blocks: Blocks | None = None
    tenant_blocks: Blocks | None = None
    max_keep_alive_s: Annotated[float, Field(ge=0, le=30 * 86_400)] | None = None
    keys: list[Annotated[_Key, BeforeValidator(_key)]]

    def tenant(self, defaults: Tenant) -> Tenant:
        """With `defaults` for what is left out."""
        other = {"priority", "classes", "models", "keys", "max_keep_alive_s"}
        given: dict[str, Any] = self.model_dump(exclude_none=True, exclude=other)
        if self.max_keep_alive_s is not None:
            given["max_keep_s"] = self.max_keep_alive_s
        if self.priority is not None:
            given["best_urgency"] = self.priority
        if self.classes is not None:
            given["classes"] = frozenset(CLASSES[name] for name in self.classes)
        if self.models is not None:
            given["models"] = frozenset(self.models)
        return replace(defaults, **given)


class _File(Entry):
    tenants: Annotated[list[_Tenant], Field(min_length=1)]
