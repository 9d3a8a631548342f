"""Merging, acknowledging and rewinding of an ingress's outbox."""

from __future__ import annotations

from workers.outbox import Outbox
from workers.plan import Finish, TokenEvent


def event(index: int, *tokens: int, request: str = "r", finish: Finish | None = None) -> TokenEvent:
    return TokenEvent(request, 0, index, tokens, finish)


def test_unread_events_of_a_request_merge_into_one() -> None:
    woken: list[int] = []
    box = Outbox(7, lambda: woken.append(1))
    box.put([event(0, 5)])
    box.put([event(1, 6), event(0, 9, request="q")])
    message = box.read()
    assert message is not None and (message.number, message.epoch) == (1, 7)
    assert {(e.request, e.index, e.tokens) for e in message.events} == {("r", 0, (5, 6)), ("q", 0, (9,))}
    assert len(woken) == 2 and box.read() is None


def test_a_new_reader_gets_what_was_not_acknowledged_and_nothing_else() -> None:
    box = Outbox(1, lambda: None)
    box.put([event(0, 1)])
    box.read()
    box.put([event(1, 2)])
    box.read()
    box.put([event(2, 3, finish=Finish.LENGTH)])
    box.read()
    box.rewind(1, lambda: None)
    message = box.read()
    assert message is not None and message.number == 4
    assert [(e.index, e.tokens, e.finish) for e in message.events] == [(1, (2, 3), Finish.LENGTH)]
    box.acknowledge(4)
    box.rewind(4, lambda: None)
    assert box.read() is None


def test_acknowledged_tokens_are_forgotten() -> None:
    box = Outbox(1, lambda: None)
    for index in range(100):
        box.put([event(index, index)])
        message = box.read()
        assert message is not None
        box.acknowledge(message.number)
    assert box.backlog == 0
    box.put([event(100, finish=Finish.ABORT)])
    message = box.read()
    assert message is not None and message.events[0].finish is Finish.ABORT
    box.acknowledge(message.number)
    assert box.requests == 0


def test_an_end_without_tokens_reaches_the_reader() -> None:
    box = Outbox(1, lambda: None)
    box.put([event(0, finish=Finish.ABORT)])
    message = box.read()
    assert message is not None and message.events[0].finish is Finish.ABORT
