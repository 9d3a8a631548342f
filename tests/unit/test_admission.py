"""Admission by grant: blocks, slots, prefill backlog; the watermark, and what a lone request may have."""

from __future__ import annotations

import pytest

from cluster.coordination.coordinator import Coordinator
from cluster.coordination.grants import Grant
from cluster.coordination.terms import Bounds, CoordinatorTerms
from kvstore.store import PoolReport
from tests.coordination import (
    Listener,
    answer,
    ask,
    card,
    committed,
    outcome,
    placed,
    queued,
    refused,
    report,
    running,
    tenant,
    terms,
)
from workers.sequence import Priority


def coordinator_of(bounds: Bounds | None = None, **changes: object) -> Coordinator:
    made = Coordinator(terms(bounds))
    made.join(card(**changes), 0.0)
    return made


def test_blocks_are_given_up_to_the_watermark_while_something_runs() -> None:
    coordinator = coordinator_of(Bounds(watermark=0.1), max_num_seqs=20, blocks=20, max_num_batched_tokens=1000)
    grants = [placed(coordinator, ask(str(number))) for number in range(9)]
    assert committed(coordinator) == 18
    queued(coordinator, ask("10"))
    coordinator.settle([outcome(grants[0])], 1.0)
    assert Listener(coordinator).granted(1.0) == ["10"]


@pytest.mark.parametrize("watermark", [0.0, 0.02, 0.5])
def test_a_lone_request_may_have_the_whole_group_and_nothing_comes_beside_it(watermark: float) -> None:
    coordinator = coordinator_of(Bounds(watermark=watermark))
    whole = placed(coordinator, ask(prompt=100, most=60))
    assert whole.blocks == 10
    queued(coordinator, ask("small", prompt=1, most=1))
    coordinator.settle([outcome(whole)], 1.0)
    assert Listener(coordinator).granted(1.0) == ["small"]


def test_what_needs_one_block_more_than_the_group_is_refused_with_numbers() -> None:
    refusal = refused(coordinator_of(), ask(prompt=100, most=61))
    assert (refusal.code, refusal.retry_after) == ("never_fits", None)
    assert "161 tokens" in refusal.message and "160" in refusal.message


@pytest.mark.parametrize(("slots", "ahead", "most"), [(4, 0.125, 5), (16, 0.125, 18), (64, 0.25, 80), (1, 0.5, 2)])
def test_slots_are_given_a_little_ahead(slots: int, ahead: float, most: int) -> None:
    coordinator = coordinator_of(
        Bounds(slots_ahead=ahead), max_num_seqs=slots, blocks=10_000, max_num_batched_tokens=10_000
    )
    answers = [answer(coordinator, ask(str(number))) for number in range(most + 3)]
    assert sum(isinstance(found, Grant) for found in answers) == most


def test_prompts_are_given_for_a_bounded_number_of_full_steps() -> None:
    coordinator = coordinator_of(
        Bounds(backlog_steps=4), max_num_seqs=100, blocks=10_000, max_model_len=10_000, max_num_batched_tokens=64
    )
    grants = [placed(coordinator, ask(str(number), prompt=64)) for number in range(4)]
    queued(coordinator, ask("4", prompt=64))
    coordinator.report(running(grants, waiting_tokens=256), 0.5)
    assert coordinator.waiting == 1, "what the group has not computed yet still counts"
    coordinator.report(running(grants, 2, waiting_tokens=128), 1.0)
    assert coordinator.waiting == 0


def test_a_prompt_longer_than_the_whole_backlog_waits_until_there_is_none() -> None:
    coordinator = coordinator_of(
        Bounds(backlog_steps=2), max_num_seqs=100, blocks=10_000, max_model_len=10_000, max_num_batched_tokens=64
    )
    first = placed(coordinator, ask("1", prompt=1000))
    queued(coordinator, ask("2", prompt=1000))
    coordinator.report(running([first], waiting_tokens=0), 1.0)
    assert Listener(coordinator).granted(1.0) == ["2"]


def test_between_reports_the_backlog_shrinks_at_the_measured_speed() -> None:
    coordinator = coordinator_of(
        Bounds(backlog_steps=4), max_num_seqs=100, blocks=10_000, max_model_len=10_000, max_num_batched_tokens=64
    )
    grants = [placed(coordinator, ask(str(number), prompt=64)) for number in range(4)]
    coordinator.report(running(grants, waiting_tokens=256), 0.5)
    coordinator.report(running(grants, 2, waiting_tokens=256, computed_tokens=128), 1.5)
    queued(coordinator, ask("4", prompt=64), 1.6)
    coordinator.tick(1.9)
    assert coordinator.waiting == 1
    coordinator.tick(2.1)
    assert coordinator.waiting == 0, "128 tokens a second: 64 are done half a second later"


def test_requests_of_an_earlier_coordinator_take_blocks_and_slots() -> None:
    coordinator = coordinator_of()
    coordinator.report(report(committed=9, running=3, waiting=1, live=("x", "y", "z", "w")), 0.0)
    queued(coordinator, ask("1"))
    coordinator.report(report(sequence=2, committed=8, running=4, live=("x", "y", "z", "w")), 0.5)
    assert Listener(coordinator).granted(0.5) == ["1"]
    queued(coordinator, ask("2", prompt=1, most=1), 0.5)


def test_a_group_that_shrinks_gets_nothing_but_replays_until_its_growth_fits() -> None:
    coordinator = coordinator_of(max_num_seqs=8)
    grant = placed(coordinator, ask())
    for second, sequence in ((1.0, 1), (4.0, 2), (7.0, 3)):
        coordinator.report(running([grant], sequence, committed=11), second)
    assert coordinator.groups(7.0)[0].level == "shrink"
    coordinator.report(running([grant], 4, committed=10), 7.5)
    coordinator.report(running([grant], 5, committed=9), 8.0)
    assert placed(coordinator, ask("small", prompt=1, most=1), 8.0), "it fits again"
    coordinator = coordinator_of(max_num_seqs=8, blocks=20)
    for second, sequence in ((1.0, 1), (4.0, 2), (7.0, 3)):
        coordinator.report(report(sequence=sequence, committed=11, running=1), second)
    assert coordinator.groups(7.0)[0].level == "shrink", "11 of the 10 blocks that its pool has"
    queued(coordinator, ask("new", prompt=1, most=1), 7.0)
    assert placed(coordinator, ask("old", 1, replay=True, prompt=1, most=1), 7.0)
    coordinator.report(report(sequence=4, committed=0), 8.0)
    assert Listener(coordinator).granted(8.0) == ["new"]


def test_the_default_terms_hold_back_a_fiftieth() -> None:
    coordinator = Coordinator(CoordinatorTerms())
    coordinator.join(card(blocks=100, max_num_seqs=1000, max_num_batched_tokens=1000), 0.0)
    answers = [answer(coordinator, ask(str(number))) for number in range(50)]
    assert sum(isinstance(found, Grant) for found in answers) == 49


def saturated_with_batch(**changes: object) -> tuple[Coordinator, list[Grant]]:
    coordinator = coordinator_of(**changes)
    grants = []
    while isinstance(found := answer(coordinator, ask(f"b{len(grants)}", priority=Priority.BATCH)), Grant):
        grants.append(found)
    return coordinator, grants


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("changes", [{"max_num_seqs": 20}, {"blocks": 100, "max_num_batched_tokens": 1000}])
def test_interactive_work_is_granted_at_once_where_batch_work_fills_everything(
    changes: dict[str, object], reported: bool
) -> None:
    coordinator, grants = saturated_with_batch(**changes)
    if reported:
        coordinator.report(running(grants), 0.5)
    for number in range(5):
        placed(coordinator, ask(str(number)), 0.5)
    queued(coordinator, ask("5"), 0.5)
    queued(coordinator, ask("batch", priority=Priority.BATCH), 0.5)
    assert coordinator.waiting == 3, "no more than the group holds without its batch work"


def test_interactive_work_that_waits_gets_what_another_gives_back_before_batch_work_has_made_room() -> None:
    coordinator, batch = saturated_with_batch(max_num_seqs=20)
    grants = [placed(coordinator, ask(str(number))) for number in range(5)]
    queued(coordinator, ask("5"))
    coordinator.settle([outcome(batch[0])], 1.0)
    assert Listener(coordinator).granted(1.0) == []
    coordinator.settle([outcome(grants[0])], 1.0)
    assert coordinator.waiting == 1, "the batch request that waits still does"


def test_what_was_overbooked_on_batch_work_does_not_shrink_the_group() -> None:
    coordinator, batch = saturated_with_batch(max_num_seqs=20)
    grants = batch + [placed(coordinator, ask(str(number))) for number in range(4)]
    for half in range(20):
        coordinator.report(running(grants, half + 1, held=10), half / 2)
    assert coordinator.groups(10.0)[0].level == "trim"
    coordinator.settle([outcome(grant) for grant in grants[len(batch) :]], 10.0)
    coordinator.report(running(batch, 30), 10.5)
    assert committed(coordinator, 10.5) == 10
    queued(coordinator, ask("batch", priority=Priority.BATCH), 10.5)


def test_a_big_interactive_request_may_have_the_group_of_batch_work() -> None:
    coordinator, _ = saturated_with_batch()
    assert placed(coordinator, ask("big", prompt=80, most=80)).blocks == 10
    queued(coordinator, ask("small"))


def test_a_tenant_with_nothing_running_finds_room_beside_one_that_floods() -> None:
    coordinator = Coordinator(terms())
    coordinator.join(card(blocks=100, max_num_seqs=100, max_num_batched_tokens=10_000), 0.0)
    quiet, flood = tenant("quiet"), tenant("flood")
    first = placed(coordinator, ask("q0", share=quiet), 0.0)
    coordinator.settle([outcome(first)], 0.5)
    taken = 0
    while isinstance(answer(coordinator, ask(f"f{taken}", share=flood), 1.0), Grant):
        taken += 1
    assert taken == 49, "two blocks each: as much as the quiet one took is kept"
    placed(coordinator, ask("q1", share=quiet), 2.0)
    found = [answer(coordinator, ask(f"q{number}", share=quiet), 2.0) for number in range(2, 9)]
    assert not any(isinstance(one, Grant) for one in found), "what is kept is for those that have nothing there"


def test_a_tenant_alone_may_have_all_the_room() -> None:
    coordinator = Coordinator(terms())
    coordinator.join(card(blocks=100, max_num_seqs=100, max_num_batched_tokens=10_000), 0.0)
    taken = 0
    while isinstance(answer(coordinator, ask(f"f{taken}", share=tenant("flood")), 1.0), Grant):
        taken += 1
    assert taken == 50


def test_a_guest_comes_in_while_the_group_shrinks_and_however_long_others_have_waited() -> None:
    coordinator = Coordinator(terms())
    coordinator.join(card(blocks=100, max_num_seqs=100, max_num_batched_tokens=10_000), 0.0)
    flood = [placed(coordinator, ask(f"f{number}", share=tenant("flood")), 0.0) for number in range(40)]
    for half in range(10):
        full = PoolReport(100, 20, 80, 0, 0, 16)
        coordinator.report(running(flood, half + 1, committed=130, pool=full), half / 2)
    assert coordinator.groups(5.0)[0].level == "shrink"
    queued(coordinator, ask("more", share=tenant("flood")), 5.0)
    placed(coordinator, ask("q0", prompt=80, share=tenant("quiet")), 5.0)
    queued(coordinator, ask("q1", share=tenant("quiet")), 5.0)
    placed(coordinator, ask("o", prompt=80, share=tenant("other")), 5.0)
    queued(coordinator, ask("p", share=tenant("one more")), 5.0)  # an eighth of the pool is what all guests may take
    coordinator.settle([outcome(flood[0])], 5.1)
    assert coordinator.waiting == 3


def test_a_guest_takes_blocks_that_are_free_now_no_others() -> None:
    coordinator = Coordinator(terms())
    coordinator.join(card(blocks=100, max_num_seqs=100, max_num_batched_tokens=10_000), 0.0)
    flood = [placed(coordinator, ask(f"f{number}", share=tenant("flood")), 0.0) for number in range(50)]
    coordinator.report(running(flood, 1, committed=130, pool=PoolReport(100, 1, 99, 0, 0, 16)), 0.5)
    queued(coordinator, ask("q", share=tenant("quiet")), 1.0)
    coordinator.settle([outcome(flood[0])], 1.1)
    coordinator.tick(1.2)
    assert coordinator.waiting == 0, "two blocks are back"
