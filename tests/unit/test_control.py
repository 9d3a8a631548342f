"""Settings that change while everything runs, and single groups that are closed, emptied and built anew."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from cluster.coordination.cards import GroupCard
from cluster.coordination.control import Cordon, Empty, Purge, Revise, Rollback, UnknownGroup
from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import REFUSED_FULL, REFUSED_NO_GROUP, Ask, Grant, Outcome, Refusal, Ticket
from cluster.coordination.revisions import Edition, RevisionError
from cluster.coordination.terms import LineBounds, Thresholds
from cluster.settings import LiveSettings
from kvstore.store import PoolReport
from workers.orders import GroupTerms, Orders
from workers.plan import Finish, GroupReport


class Service:
    """A coordinator and groups of 4 sequences that say what they are asked to."""

    def __init__(self, *groups: str, **kept: object) -> None:
        self.coordinator = Coordinator(first_epoch=1, **kept)  # type: ignore[arg-type]
        self.now = 0.0
        self.epochs: dict[str, int] = {}
        self.reports = 0
        for group in groups:
            self.join(group)

    def join(self, group: str) -> None:
        card = GroupCard(group, ("m",), f"{group}-rank0", 100, 16, 4, 64, 1600)
        self.epochs[group] = self.coordinator.join(card, self.now)
        self.beat(group)

    def beat(self, group: str, revision: int = 0, live: tuple[str, ...] = ()) -> Orders | None:
        self.reports += 1
        pool = PoolReport(100, 100 - 10 * len(live), 10 * len(live), 0, 0, 16)
        report = GroupReport(
            group, self.epochs[group], self.reports, self.reports, pool, 10 * len(live), len(live), 0, 0,
            accepted=live, live=live, revision=revision,
        )  # fmt: skip
        return self.coordinator.report(report, self.now).orders

    def ask(self, name: str, left: float | None = None) -> Grant | Ticket | Refusal:
        ask = Ask(name, 0, "m", b"", 32, 32, left=left)
        return self.coordinator.place("ingress", (ask,), self.now)[0]

    def state(self, group: str) -> str:
        [row] = [row for row in self.coordinator.status(self.now)["groups"] if row["group"] == group]  # type: ignore[attr-defined]
        return str(row["state"])

    def word(self, group: str) -> str:
        return dict(self.coordinator.status(self.now)["maintenance"]).get(group, "")  # type: ignore[call-overload]

    def revise(self, live: LiveSettings, base: int | None = None) -> int:
        return self.coordinator.carry_out(Revise(Edition(str(live), live), base), self.now).number

    def drops(self, seconds: float) -> None:
        """Time passes without a word of any group."""
        for _ in range(int(seconds / 5)):
            self.now += 5
            self.coordinator.news("ingress", 0, self.now)
            self.coordinator.tick(self.now)


TERMS = GroupTerms(session_ttl_s=60.0, prefix_cache=False, max_num_seqs=2)
LIVE = LiveSettings(LineBounds(requests=1), Thresholds(trim_up=0.5, trim_down=0.4), (("m", TERMS),), log_level="debug")


def test_a_group_gets_settings_with_the_next_reply_until_it_goes_by_them() -> None:
    service = Service("a")
    number = service.revise(LIVE)
    orders = service.beat("a", revision=1)
    assert orders == Orders(number, replace(TERMS, log_level="debug"))
    assert service.beat("a", revision=number) is None
    assert service.coordinator.status(service.now)["revision"]["number"] == number == 2  # type: ignore[index]


def test_bounds_of_the_line_sequences_of_a_group_and_the_ladder_hold_at_once_for_who_is_there() -> None:
    service = Service("a")
    assert all(isinstance(service.ask(f"r{n}"), Grant) for n in range(5)), "4 slots and one ahead"
    assert isinstance(service.ask("r5"), Ticket) and isinstance(service.ask("r6"), Ticket)
    service.revise(LIVE)
    refused = service.ask("r7")
    assert isinstance(refused, Refusal) and refused.code == REFUSED_FULL
    other = Service("a")
    other.revise(LIVE)
    assert [type(other.ask(f"r{n}")) for n in range(4)] == [Grant, Grant, Grant, Ticket], "2 slots and one ahead"
    other.beat("a", live=("x",) * 5)
    [group] = other.coordinator.groups(other.now)
    assert group.level == "trim", "0.5 is held"


def test_limits_never_exceed_what_the_group_was_built_with() -> None:
    service = Service("a")
    service.revise(replace(LIVE, groups=(("m", GroupTerms(max_num_seqs=50, max_num_batched_tokens=5000)),)))
    assert [type(service.ask(f"r{n}")) for n in range(6)] == [Grant] * 5 + [Ticket]


def test_a_change_of_what_somebody_else_has_changed_is_refused() -> None:
    service = Service("a")
    assert service.revise(LIVE, base=1) == 2
    with pytest.raises(RevisionError, match="revision 2 is in force, not 1"):
        service.revise(LiveSettings(), base=1)
    assert service.revise(LIVE) == 2, "nothing changes"


def test_rollback_goes_back_step_by_step_under_new_numbers() -> None:
    service = Service("a")
    service.revise(LIVE)
    service.revise(replace(LIVE, log_level="error"))
    first = service.coordinator.carry_out(Rollback(3), service.now)
    assert (first.number, first.edition.live, first.undone) == (4, LIVE, True)
    second = service.coordinator.carry_out(Rollback(), service.now)
    assert second.number == 5 and second.edition.live == LiveSettings()
    with pytest.raises(RevisionError, match="no revision before 5"):
        service.coordinator.carry_out(Rollback(), service.now)


def test_a_purge_reaches_every_group_and_a_rollback_does_not_take_it_back() -> None:
    service = Service("a", "b")
    service.revise(LIVE)
    number = service.coordinator.carry_out(Purge(), service.now).number
    orders = [service.beat(group, revision=2) for group in "ab"]
    assert [(one.revision, one.terms.purges) for one in orders if one] == [(number, 1)] * 2
    assert service.coordinator.carry_out(Rollback(), service.now).edition.live.purges == 1


def test_settings_and_cordons_outlive_the_coordinator() -> None:
    service = Service("a", "b")
    number = service.revise(LIVE)
    service.coordinator.carry_out(Cordon("a"), service.now)
    revisions, cordoned = pickle.loads(pickle.dumps(service.coordinator.memory))
    again = Service("a", "b", revisions=revisions, cordoned=cordoned)
    assert again.state("a") == "cordoned" and again.state("b") == "up"
    orders = again.beat("b", revision=0)
    assert orders is not None and (orders.revision, orders.terms.session_ttl_s) == (number, 60.0)
    assert again.coordinator.carry_out(Rollback(), 0.0).edition.live == LiveSettings()


def test_ingresses_say_by_which_revision_they_go_and_what_stands_in_their_way() -> None:
    service = Service("a")
    service.revise(LIVE)
    assert service.coordinator.revision("one", 1, "", service.now).number == 2
    service.coordinator.revision("two", 2, "keys.yaml cannot be read", service.now)
    service.coordinator.revision("", -1, "", service.now)
    shown = service.coordinator.status(service.now)["ingress_settings"]
    assert shown == [
        {"ingress": "one", "revision": 1, "fault": ""},
        {"ingress": "two", "revision": 2, "fault": "keys.yaml cannot be read"},
    ]
    service.now += 31.0
    assert service.coordinator.status(service.now)["ingress_settings"] == []


def test_nothing_new_goes_to_a_cordoned_group_and_an_unknown_name_lists_those_there_are() -> None:
    service = Service("a", "b")
    service.coordinator.carry_out(Cordon("a"), service.now)
    answers = [service.ask(f"r{n}") for n in range(5)]
    assert {answer.group for answer in answers if isinstance(answer, Grant)} == {"b"}
    with pytest.raises(UnknownGroup, match="no group called 'c'; groups: a, b"):
        service.coordinator.carry_out(Cordon("c"), service.now)


def test_with_the_only_group_cordoned_the_line_holds_requests_until_it_is_open_or_they_are_late() -> None:
    service = Service("a")
    service.coordinator.carry_out(Cordon("a"), service.now)
    assert isinstance(service.ask("kept"), Ticket) and isinstance(service.ask("late", left=5.0), Ticket)
    for _ in range(6):
        service.now += 1.0
        service.beat("a")
    assert service.coordinator.waiting == 1
    service.coordinator.carry_out(Cordon("a", on=False), service.now)
    answers = service.coordinator.news("ingress", 0, service.now).answers
    assert [(answer.request, type(answer)) for answer in answers] == [("late", Refusal), ("kept", Grant)]


def test_the_line_holds_requests_for_the_successor_of_a_group_that_leaves_but_not_of_one_that_died() -> None:
    service = Service("a")
    service.coordinator.leave("a", service.epochs["a"], service.now, replaced=True)
    assert isinstance(service.ask("r"), Ticket)
    service.drops(40.0)
    assert not service.coordinator.groups(service.now)
    service.join("b")
    [answer] = service.coordinator.news("ingress", 0, service.now).answers
    assert isinstance(answer, Grant) and answer.group == "b"
    service.coordinator.leave("b", service.epochs["b"], service.now)
    other = Service("a")
    other.coordinator.leave("a", other.epochs["a"], other.now)
    refused = other.ask("r")
    assert isinstance(refused, Refusal) and refused.code == REFUSED_NO_GROUP


def test_a_drained_group_ends_what_runs_or_hands_it_over_in_time_and_stays_closed() -> None:
    service = Service("a")
    grant = service.ask("r")
    assert isinstance(grant, Grant)
    service.beat("a", 1, live=(grant.id,))
    service.coordinator.carry_out(Empty("a", within_s=10.0), service.now)
    assert service.beat("a", 1, live=(grant.id,)) is None
    assert service.word("a") == "draining, 10 s left"
    service.now = 10.0
    orders = service.beat("a", 1, live=(grant.id,))
    assert orders is not None and orders.hand_over and not orders.rebuild
    assert service.word("a") == "handing over"
    service.coordinator.settle((Outcome(grant.id, Finish.ABORT, 32, 0, 1),), service.now)
    assert service.beat("a", 1) is None
    assert (service.word("a"), service.state("a")) == ("drained", "cordoned")


@pytest.mark.parametrize("closed", [False, True])
def test_a_restarted_group_is_built_anew_once_empty_and_is_then_as_it_was(closed: bool) -> None:
    service = Service("a", "b")
    if closed:
        service.coordinator.carry_out(Cordon("a"), service.now)
    service.coordinator.carry_out(Empty("a", within_s=10.0, restart=True), service.now)
    orders = service.beat("a", 1)
    assert orders is not None and orders.rebuild and not orders.hand_over
    service.coordinator.leave("a", service.epochs["a"], service.now)
    service.join("a")
    assert service.beat("a", 1) is None
    assert (service.state("a"), service.word("a")) == ("cordoned" if closed else "up", "")


def test_uncordoning_calls_a_drain_off_and_a_group_that_goes_for_good_is_forgotten() -> None:
    service = Service("a")
    service.coordinator.carry_out(Empty("a", within_s=0.0, restart=True), service.now)
    service.coordinator.carry_out(Cordon("a", on=False), service.now)
    assert service.beat("a", 1) is None and service.state("a") == "up"
    service.coordinator.carry_out(Cordon("a"), service.now)
    service.coordinator.leave("a", service.epochs["a"], service.now, replaced=True)
    assert service.coordinator.memory[1] == frozenset()
