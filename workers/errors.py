"""What a group says no with. One small tree; the ingress maps it to HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.message import message


class EngineRefused(Exception):
    """A request that this group does not take. `code` is one of the CODE_… constants, the message is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


class CallFailed(Exception):
    """A call to a group failed for a reason that nobody foresaw; the message says what was raised there."""


@message
@dataclass(frozen=True, slots=True)
class Refused:
    """Why the engine did not take one request of a batch, as a value that travels."""

    request: str
    attempt: int
    code: str
    message: str


CODE_VOID = "grant_void"
CODE_DUPLICATE = "duplicate"
CODE_DRAINING = "draining"
CODE_NEVER_FITS = "never_fits"
CODE_NO_LEASE = "no_lease"
CODE_DEAD = "group_dead"
CODE_FULL = "group_full"
