"""What can happen to one request, and what it then wants done: the alphabet of its state machine. Plain frozen values.

Knows no coordinator, no engine and no client; a shell turns calls into events and actions into calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.coordination.grants import Ask, Grant, Outcome, Refusal, Ticket
from workers.plan import TokenEvent
from workers.sequence import Request

# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The request has arrived."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The coordinator has answered an ask, at once or (after a Ticket) by its news."""

    answer: Grant | Ticket | Refusal


@dataclass(frozen=True, slots=True)
class AskLost:
    """An ask got no answer; whether it was heard is not known."""

    attempt: int


@dataclass(frozen=True, slots=True)
class LineLost:
    """The coordinator may have forgotten who waits: ask again."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """The group has accepted this attempt."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The group does not take this attempt; `code` is one of workers.errors' CODE_… constants."""

    attempt: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SubmitLost:
    """A submit got no answer; whether the group runs it is not known."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """News from a group that is in `epoch`."""

    epoch: int
    event: TokenEvent


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The event stream of this incarnation is lost. `gone`: the group is dead or out of reach; otherwise it is there
    but has ended what this ingress had running."""

    group: str
    epoch: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client has left."""


@dataclass(frozen=True, slots=True)
class Satisfied:
    """The client has all it wanted, a stop string for one: what runs on is of no use."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """The time of the last Wake has come (or some other time: it does no harm)."""


Event = (
    Started
    | Placed
    | AskLost
    | LineLost
    | Submitted
    | Rejected
    | SubmitLost
    | Arrived
    | GroupLost
    | Cancelled
    | Satisfied
    | Ticked
)

# -- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Ask the coordinator; the answer is Placed or AskLost."""

    ask: Ask


@dataclass(frozen=True, slots=True)
class Leave:
    """Tell the coordinator that this attempt waits no more; a grant that is on its way is void."""

    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Subscribe to the grant's group, then submit; the answer is Submitted, Rejected, SubmitLost or GroupLost."""

    grant: Grant
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End the attempt that this grant was for, if the group runs it."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Emit:
    """Show the client new tokens; more will come."""

    event: TokenEvent


@dataclass(frozen=True, slots=True)
class Settle:
    """Tell the coordinator how a submitted grant ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell the coordinator that a grant was not used."""

    grant: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Send Ticked at time `at`, and at no other; None: not at all."""

    at: float | None


@dataclass(frozen=True, slots=True)
class End:
    """The one last word to the client: a final event, or a refusal before any event, or (it has left) nothing."""

    event: TokenEvent | None = None
    refusal: Refusal | None = None


Action = Place | Leave | Submit | Abort | Emit | Settle | Withdraw | Wake | End
