"""Cards, asks and reports for the coordinator's tests, and short ways to its answers."""

from __future__ import annotations

from dataclasses import replace

from cluster.coordination.cards import GroupCard
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Ask, Grant, Outcome, Refusal, Share, Ticket
from cluster.coordination.terms import Bounds, CoordinatorTerms, LineBounds
from kvstore.store import PoolReport
from workers.plan import Finish, GroupReport

INGRESS = "i"


def card(name: str = "a", **changes: object) -> GroupCard:
    """10 blocks of 16 tokens, 4 slots, steps of 64 tokens."""
    plain = GroupCard(
        name,
        ("m",),
        f"at-{name}",
        blocks=10,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def ask(request: str = "r", attempt: int = 0, prompt: int = 16, most: int = 16, **changes: object) -> Ask:
    """Two blocks."""
    return replace(Ask(request, attempt, "m", b"n", prompt, most), **changes)  # type: ignore[arg-type]


def report(epoch: int = 1, sequence: int = 1, group: str = "a", held: int = 0, **changes: object) -> GroupReport:
    pool = PoolReport(10, 10 - held, held, 0, 0, 16)
    plain = GroupReport(group, epoch, sequence, sequence, pool, 0, 0, 0, 0, live=())
    return replace(plain, **changes)  # type: ignore[arg-type]


def running(
    grants: list[Grant], sequence: int = 1, *, group: str = "a", held: int = 0, **changes: object
) -> GroupReport:
    """A report of a group in which `grants` run, each with what it was granted."""
    ids = tuple(grant.id for grant in grants)
    blocks = sum(grant.blocks for grant in grants)
    epoch = grants[0].epoch if grants else 1
    plain = report(epoch, sequence, group, held, accepted=ids, live=ids, committed=blocks, running=len(ids))
    return replace(plain, **changes)  # type: ignore[arg-type]


def terms(bounds: Bounds | None = None, **line: object) -> CoordinatorTerms:
    """Few slots ahead and no watermark, so that room is easy to count; `line` changes the line's bounds."""
    return CoordinatorTerms(bounds or Bounds(watermark=0.0), LineBounds(**line))  # type: ignore[arg-type]


def tenant(name: str, weight: float = 1.0, most: int = 512) -> Share:
    return Share(name, weight, most)


def answer(coordinator: Coordinator, one: Ask, now: float = 0.0, ingress: str = INGRESS) -> Grant | Ticket | Refusal:
    (found,) = coordinator.place(ingress, [one], now)
    coordinator.check()
    return found


def placed(coordinator: Coordinator, one: Ask, now: float = 0.0) -> Grant:
    found = answer(coordinator, one, now)
    assert isinstance(found, Grant), found
    return found


def queued(coordinator: Coordinator, one: Ask, now: float = 0.0, ingress: str = INGRESS) -> Ticket:
    found = answer(coordinator, one, now, ingress)
    assert isinstance(found, Ticket), found
    return found


def refused(coordinator: Coordinator, one: Ask, now: float = 0.0) -> Refusal:
    found = answer(coordinator, one, now)
    assert isinstance(found, Refusal), found
    return found


class Listener:
    """An ingress that acknowledges all it hears."""

    def __init__(self, coordinator: Coordinator, name: str = INGRESS) -> None:
        self.coordinator, self.name, self.acked = coordinator, name, 0

    def hear(self, now: float) -> list[Grant | Refusal]:
        news = self.coordinator.news(self.name, self.acked, now)
        self.acked = news.number
        self.coordinator.check()
        return list(news.answers)

    def granted(self, now: float) -> list[str]:
        """The requests that were granted since the last time."""
        answers = self.hear(now)
        assert all(isinstance(found, Grant) for found in answers), answers
        return [found.request for found in answers]


def committed(coordinator: Coordinator, now: float = 0.0) -> int:
    return sum(state.committed for state in coordinator.groups(now))


def outcome(grant: Grant, finish: Finish = Finish.LENGTH, output: int = 16) -> Outcome:
    return Outcome(grant.id, finish, 16, 0, output)


def full(**line: object) -> tuple[Coordinator, list[Grant]]:
    """One group, all of whose five places (its ten blocks) are taken."""
    coordinator = Coordinator(terms(**line), first_epoch=100)
    coordinator.join(card(), 0.0)
    return coordinator, [placed(coordinator, ask(f"full{number}")) for number in range(5)]
