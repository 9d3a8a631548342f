"""Who asks, by the request's headers: the tenant whose key was sent, the session, and how urgent it is.

The key is looked at before anything else of a request, and appears in no message and no log.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from starlette.datastructures import Headers

from cluster.errors import ApiError, invalid_key
from cluster.protocol.api import MAX_SESSION_CHARS, MAX_TIMEOUT_S
from cluster.tenants import CLASSES, KeyRing, Tenant
from workers.sequence import Priority

SESSION = "x-session-id"
TIMEOUT = "x-request-timeout"
CLASS = "x-priority-class"


@dataclass(frozen=True, slots=True)
class Caller:
    """`session` is the client's own name for its conversation, `timeout_s` its deadline in seconds, `urgency_class`
    what it asks to be treated as; None each where no header says it."""

    tenant: Tenant
    session: str | None = None
    timeout_s: float | None = None
    urgency_class: Priority | None = None

    def within(self, session: str) -> Caller:
        """The same, about the session that the path names."""
        return replace(self, session=session)


class Callers:
    """Tells who asks. `ring` gives the keys as they stand, None where there are none: then everybody is `unkeyed`.
    `now` is in seconds since 1970, as keys expire by the calendar."""

    def __init__(
        self, ring: Callable[[], KeyRing | None], now: Callable[[], float], unkeyed: Callable[[], Tenant] = Tenant
    ) -> None:
        self._ring = ring
        self._now = now
        self._unkeyed = unkeyed

    @property
    def keyed(self) -> bool:
        """Whether a key is needed."""
        return self._ring() is not None

    def tenant(self, headers: Headers) -> Tenant:
        """Whose key was sent. Raises ApiError (401) when there is none that counts."""
        ring = self._ring()
        if ring is None:
            return self._unkeyed()
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise invalid_key(sent=False)
        tenant = ring.tenant_of(key.strip(), self._now())
        if tenant is None:
            raise invalid_key(sent=True)
        return tenant

    def caller(self, headers: Headers) -> Caller:
        """All that the headers say. Raises ApiError: 401 as above, 400 for a header that cannot be understood."""
        tenant = self.tenant(headers)
        return Caller(tenant, _session(headers), _timeout(headers), _class(headers))


def check_session(session: str, param: str) -> None:
    """Raises ApiError (400) for a name that is too long."""
    if len(session) > MAX_SESSION_CHARS:
        message = f"The session's name ({param}) has {len(session)} characters; at most {MAX_SESSION_CHARS} are taken."
        raise ApiError(message, "invalid_value", param)


def _session(headers: Headers) -> str | None:
    session = headers.get(SESSION)
    if not session:
        return None
    name = _text(session)
    check_session(name, SESSION)
    return name


def _text(value: str) -> str:
    """A header's value, which arrives as Latin-1, as the UTF-8 that most clients mean: a session has one name in
    headers, paths and bodies."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def _timeout(headers: Headers) -> float | None:
    value = headers.get(TIMEOUT)
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        message = f"The header {TIMEOUT} must be a number of seconds above 0 and up to {MAX_TIMEOUT_S:g}."
        raise ApiError(message, "invalid_value", TIMEOUT)
    return seconds


def _class(headers: Headers) -> Priority | None:
    value = headers.get(CLASS)
    if not value:
        return None
    if value.lower() not in CLASSES:
        raise ApiError(f"The header {CLASS} must be {' or '.join(CLASSES)}.", "invalid_value", CLASS)
    return CLASSES[value.lower()]
