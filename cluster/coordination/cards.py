"""What a group says of itself when it joins, and what the coordinator answers to it and tells about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvstore.extent import Extent
from kvstore.message import message
from kvstore.store import PoolReport
from workers.orders import Orders
from workers.plan import Limits

PROTOCOL = 3
"""Version of the calls between ingress, coordinator and groups: raised when a field changes its meaning, or a call is
needed that others did not have. A field that is added changes nothing (`kvstore.message`)."""
OLDEST_PROTOCOL = 2
"""The oldest version that this one gets along with: while a service is updated, both run."""


def get_along(theirs: int, their_oldest: int = 0) -> bool:
    """Whether a peer of version `theirs`, which understands `their_oldest` and later (0: only its own), and this one
    can work together."""
    return theirs >= OLDEST_PROTOCOL and (their_oldest or theirs) <= PROTOCOL


@message
@dataclass(frozen=True, slots=True)
class Identity:
    """What a coordinator says of itself before it is trusted: which deployment it belongs to, which protocols it
    speaks, and the version of its code."""

    protocol: int
    config: str
    oldest: int = 0
    version: str = ""

    def serves(self, config: str) -> bool:
        """Whether it is the coordinator of the deployment `config`, and can be talked to."""
        return self.config == config and get_along(self.protocol, self.oldest)


@message
@dataclass(frozen=True, slots=True)
class RankCard:
    """One rank process. `pool_bytes` is its share of the KV pool, `block_bytes` that of one block, `kv` what a token's
    keys and values look like, in words; `kernel` names what computes there, `kernel_why` says why that and nothing
    faster."""

    rank: int
    pid: int
    node: str
    threads: int
    device: str
    pool_bytes: int
    kernel: str = ""
    kernel_why: str = ""
    block_bytes: int = 0
    kv: str = ""


@message
@dataclass(frozen=True, slots=True)
class GroupCard:
    """One tensor-parallel group that can take work. `models` are the names it serves; `address` is how an ingress
    reaches its engine (opaque here); `revision` identifies weights, precision and code; `restarts`
    is how often its owner has built it anew. `windows` are those of its layer groups, `ahead` the tokens of a sequence
    that may be on their way at once."""

    group: str
    models: tuple[str, ...]
    address: str
    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    ranks: tuple[RankCard, ...] = ()
    protocol: int = PROTOCOL
    revision: str = ""
    restarts: int = 0
    windows: tuple[int | None, ...] = (None,)
    ahead: int = 1

    @property
    def extent(self) -> Extent:
        """How tokens become blocks here."""
        return Extent(self.block_size, self.windows, self.ahead)

    @property
    def kernels(self) -> str:
        """What the ranks compute with, and why, in words."""
        return "; ".join(dict.fromkeys(f"{rank.kernel} ({rank.kernel_why})" for rank in self.ranks))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output, that this group can ever hold."""
        return min(self.max_model_len, self.extent.longest_for(self.blocks))


class Standing(Enum):
    """Whether a group takes new work, and if not, why."""

    UP = "up"
    STALLED = "stalled"
    LAPSED = "lapsed"
    LEAVING = "leaving"


@message
@dataclass(frozen=True, slots=True)
class GroupState:
    """A group as the coordinator sees it now. `committed` are blocks that grants and the group's own report take up;
    `grants` are open ones, void ones included. `reported_s` and `progressed_s` are seconds since its last report and
    since it last made progress (or had nothing to do); `pool` is None until its first report;
    `level` is its row of the ladder. One that is `cordoned` gets nothing new until an operator says so."""

    card: GroupCard
    epoch: int
    standing: Standing
    committed: int
    grants: int
    running: int
    waiting: int
    load: float
    reported_s: float
    progressed_s: float
    sessions: int = 0
    pool: PoolReport | None = None
    level: str = "normal"
    cordoned: bool = False


@message
@dataclass(frozen=True, slots=True)
class SessionCopy:
    """What one group has cached of a session: blocks, tokens at most, seconds until they expire."""

    group: str
    blocks: int
    tokens: int
    expires_s: float


@message
@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a report.

    `known` False: the report counted for nothing. Then `epoch` above the report's own means that another incarnation
    has taken over and the sender should stop; otherwise it should join again with its card. `void` names grants that
    must not be accepted any more; it is repeated until a report's `voided` acknowledges them. `limits` hold until the
    next reply (a group that hears nothing for long goes back to its own). The next report is due in `beat_s`. `orders`
    are there while the group goes by other settings than those in force, or something is asked of it.
    """

    known: bool
    epoch: int
    void: tuple[str, ...] = field(default=())
    limits: Limits | None = None
    beat_s: float = 0.5
    orders: Orders | None = None
