"""What an operator may set of the coordinator: when a group counts as gone, how long the line may get, when the ladder
moves. Frozen values with their defaults; decides nothing and knows no file format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """A group without a report for `lapse_s`, or without progress on its work for `stall_s`, gets nothing new; one that
    is silent for `drop_s` is forgotten with its grants and joins again when it is back. A grant that no group has taken
    within `grant_s` is void. `slots_ahead` is the share of a group's slots (at least one) for which it gets requests
    before their slot is free, so that no slot waits for a round trip; `backlog_steps` how many full steps of prefill
    may be granted ahead; `watermark` the share of blocks that stays ungranted while something runs. Where several
    tenants were served within `guest_s`, room is kept for those that have nothing there, as much as they took lately
    and at most `guest_share` of the blocks: one that asks little need not wait until one that floods ends something.
    `forget_s`: how long an ended request's latest attempt is remembered. `affinity_s` and `affinity_keys`: how long,
    and how many, likenesses of requests are remembered with the group that served them."""

    lapse_s: float = 5.0
    stall_s: float = 30.0
    drop_s: float = 30.0
    grant_s: float = 5.0
    forget_s: float = 60.0
    slots_ahead: float = 0.125
    backlog_steps: int = 8
    watermark: float = 0.02
    guest_share: float = 0.125
    guest_s: float = 60.0
    affinity_s: float = 300.0
    affinity_keys: int = 262_144


@dataclass(frozen=True, slots=True)
class LineBounds:
    """At most `requests` and `tokens` (prompt and expected output) wait per model. Waiting for `aging_s` is worth one
    step of urgency, a batch request counts as interactive after `batch_s`. A request that finds no room is passed by at
    most `bypasses` others or for `bypass_s`; then a group is kept free for it. An ingress that asks for no news for
    `ingress_s` loses its places."""

    requests: int = 1024
    tokens: int = 2_000_000
    aging_s: float = 30.0
    batch_s: float = 120.0
    bypasses: int = 64
    bypass_s: float = 5.0
    ingress_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Where the ladder goes up and down; shares of a group's blocks. Trim by what is held; shrink by the forecast of
    what the live requests will hold; refuse by what is held while the line is full. `dwell_up_s` and `dwell_down_s`:
    how long a level lasts at least before the next one up or down."""

    trim_up: float = 0.80
    trim_down: float = 0.70
    shrink_up: float = 1.0
    shrink_down: float = 0.95
    refuse_up: float = 0.97
    refuse_down: float = 0.90
    dwell_up_s: float = 2.0
    dwell_down_s: float = 20.0


@dataclass(frozen=True, slots=True)
class CoordinatorTerms:
    """All of it."""

    bounds: Bounds = Bounds()
    line: LineBounds = LineBounds()
    ladder: Thresholds = Thresholds()
