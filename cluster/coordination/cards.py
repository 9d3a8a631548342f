"""What a group says of itself when it joins, and what the coordinator answers to it and tells about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvstore.extent import Extent
from kvstore.store import PoolReport
from workers.plan import Limits

PROTOCOL = 2
"""Version of the calls between ingress, coordinator and groups: raised when a field changes its meaning."""


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


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group as the coordinator sees it now. `committed` are blocks that grants and the group's own report take up;
    `grants` are open ones, void ones included. `reported_s` and `progressed_s` are seconds since its last report and
    since it last made progress (or had nothing to do); `pool` is None until its first report;
    `level` is its row of the ladder."""

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


@dataclass(frozen=True, slots=True)
class SessionCopy:
    """What one group has cached of a session: blocks, tokens at most, seconds until they expire."""

    group: str
    blocks: int
    tokens: int
    expires_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a report.

    `known` False: the report counted for nothing. Then `epoch` above the report's own means that another incarnation
    has taken over and the sender should stop; otherwise it should join again with its card. `void` names grants that
    must not be accepted any more; it is repeated until a report's `voided` acknowledges them. `limits` hold until the
    next reply (a group that hears nothing for long goes back to its own). The next report is due in `beat_s`.
    """

    known: bool
    epoch: int
    void: tuple[str, ...] = field(default=())
    limits: Limits | None = None
    beat_s: float = 0.5
