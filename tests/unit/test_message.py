"""Messages between versions: an older peer's is understood here, and ours by an older peer."""

from __future__ import annotations

import importlib
import io
import pickle
from dataclasses import MISSING, Field, field, fields, make_dataclass
from typing import Any

import pytest

from cluster.coordination.cards import OLDEST_PROTOCOL, PROTOCOL, GroupCard, Identity, Reply, get_along
from cluster.coordination.control import Cordon
from cluster.coordination.coordinator import Coordinator
from kvstore.store import PoolReport
from workers.codec import pack, unpack
from workers.orders import GroupTerms, Orders
from workers.plan import GroupReport, Limits, TokenEvent

PROTOCOL_2 = {
    "kvstore.store.PoolReport": "total free held idle dirty block_size",
    "kvstore.sessions.Terms": "tenant session_blocks tenant_blocks keep_s public public_tokens",
    "workers.plan.TokenEvent": "request attempt index tokens finish cached error",
    "workers.plan.GroupReport": (
        "group epoch sequence step pool committed running waiting waiting_tokens accepted voided live "
        "full sessions preemptions finished output_tokens prompt_tokens cached_tokens computed_tokens "
        "recomputed_tokens leaked ooms evicted expired expired_asked lost_to_scope unused_slots latest "
        "steps request_blocks"
    ),
    "workers.plan.StepRow": "rows steps seconds sampled computed",
    "workers.plan.Limits": "max_num_seqs max_num_batched_tokens chunk refill trim",
    "workers.outbox.Message": "number epoch events",
    "workers.sequence.Request": "id prompt sampling namespace attempt resumed priority grant granted_blocks left terms",
    "workers.sequence.Sampling": "max_tokens temperature top_k top_p min_p seed stop_ids",
    "workers.errors.Refused": "request attempt code message",
    "cluster.coordination.cards.RankCard": "rank pid node threads device pool_bytes kernel kernel_why block_bytes kv",
    "cluster.coordination.cards.GroupCard": (
        "group models address blocks block_size max_num_seqs max_num_batched_tokens max_model_len ranks "
        "protocol revision restarts windows ahead"
    ),
    "cluster.coordination.cards.GroupState": (
        "card epoch standing committed grants running waiting load reported_s progressed_s sessions pool level"
    ),
    "cluster.coordination.cards.SessionCopy": "group blocks tokens expires_s",
    "cluster.coordination.cards.Reply": "known epoch void limits beat_s",
    "cluster.coordination.grants.Share": "tenant weight max_waiting",
    "cluster.coordination.grants.Ask": (
        "request attempt model namespace prompt_tokens max_tokens priority age replay avoid share "
        "urgency left alone affinity"
    ),
    "cluster.coordination.grants.Grant": "id request attempt group epoch address blocks expires_s",
    "cluster.coordination.grants.Ticket": "request attempt ahead wait_s",
    "cluster.coordination.grants.Refusal": "request attempt code message retry_after",
    "cluster.coordination.grants.Outcome": "grant finish prompt_tokens cached_tokens output_tokens satisfied",
    "cluster.coordination.grants.LineNews": "number life answers",
}
"""The fields of every message as they stood in protocol 2, in order."""


def kind_of(name: str) -> type[Any]:
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(module), kind)
    assert isinstance(found, type)
    return found


def older(kind: type[Any]) -> type[Any]:
    """`kind` as a peer of protocol 2 has it."""
    known = PROTOCOL_2[f"{kind.__module__}.{kind.__qualname__}"].split()
    now: dict[str, Field[Any]] = {one.name: one for one in fields(kind)}
    parts = [(name, now[name].type, _bare(now[name])) for name in known]
    return make_dataclass(kind.__name__, parts, frozen=True, slots=True)  # type: ignore[arg-type]


def _bare(old: Field[Any]) -> Any:
    if old.default_factory is not MISSING:
        return field(default_factory=old.default_factory)
    return field() if old.default is MISSING else field(default=old.default)


def moved(value: object, kind: type[Any]) -> Any:
    """`value`'s pickled state, taken in by `kind`, as unpickling does it in another process."""
    state = pickle.loads(pickle.dumps(value.__getstate__()))  # type: ignore[operator]
    arrived = kind.__new__(kind)
    arrived.__setstate__(state)
    return arrived


@pytest.mark.parametrize("name", PROTOCOL_2)
def test_fields_are_only_added_and_behind_the_others_with_a_default(name: str) -> None:
    known, now = PROTOCOL_2[name].split(), fields(kind_of(name))
    assert [one.name for one in now[: len(known)]] == known
    assert all(one.default is not MISSING or one.default_factory is not MISSING for one in now[len(known) :])


def report(kind: type[Any], **more: object) -> Any:
    return kind("g", 7, 3, 9, PoolReport(8, 8, 0, 0, 0, 16), 2, 1, 0, 0, **more)


def test_an_older_group_is_understood_by_this_coordinator() -> None:
    coordinator = Coordinator()
    card = GroupCard("g", ("m",), "address", 8, 16, 4, 64, 128, protocol=2)
    epoch = coordinator.join(moved(older(GroupCard)(*(getattr(card, n) for n in _names(GroupCard))), GroupCard), 0.0)
    heard = moved(older(GroupReport)("g", epoch, 1, 9, PoolReport(8, 8, 0, 0, 0, 16), 0, 0, 0, 0), GroupReport)
    assert heard.revision == 0
    reply = coordinator.report(heard, 0.1)
    assert reply.known and reply.orders is not None
    old = moved(reply, older(Reply))
    assert (old.known, old.epoch, old.limits, old.beat_s) == (True, epoch, reply.limits, reply.beat_s)
    assert not hasattr(old, "orders")
    coordinator.carry_out(Cordon("g"), 0.2)
    [state] = coordinator.groups(0.2)
    kept = moved(state, older(type(state)))
    assert kept.standing.value == "leaving", "a word that an older ingress knows"


def test_a_report_of_this_group_is_understood_by_an_older_coordinator() -> None:
    old = moved(report(GroupReport, revision=5), older(GroupReport))
    assert (old.group, old.epoch, old.request_blocks) == ("g", 7, ()) and not hasattr(old, "revision")


def test_a_reply_of_an_older_coordinator_asks_nothing_of_this_group() -> None:
    reply = moved(older(Reply)(True, 3, ("grant",), Limits(1, 2, 3), 0.5), Reply)
    assert reply == Reply(True, 3, ("grant",), Limits(1, 2, 3), 0.5, None)


def test_orders_survive_the_way() -> None:
    reply = Reply(True, 3, orders=Orders(4, GroupTerms(prefix_cache=False), hand_over=True))
    assert pickle.loads(pickle.dumps(reply)) == reply


def test_a_missing_field_without_a_default_is_an_error() -> None:
    with pytest.raises(TypeError, match="epoch is missing"):
        moved(make_dataclass("Reply", ["known"], frozen=True, slots=True)(True), Reply)


def test_an_event_with_fields_that_this_side_does_not_know_is_read_over_the_socket() -> None:
    event = TokenEvent("r", 0, 0, (1, 2))
    content = pack(event)
    assert unpack(content) == event
    known = [(each.name, Any, getattr(event, each.name)) for each in fields(TokenEvent)]
    newer = make_dataclass("Newer", [*known, ("more", Any, "more")])
    assert unpack(_packed_as(TokenEvent, newer())) == event


def _packed_as(kind: type[Any], value: Any) -> bytes:
    """As a peer whose `kind` has the fields of `value` sends it."""

    content = io.BytesIO()
    pickler = pickle.Pickler(content)
    pickler.dispatch_table = {type(value): lambda sent: (kind, tuple(vars(sent).values()))}
    pickler.dump(value)
    return content.getvalue()


def _names(kind: type[Any]) -> list[str]:
    return PROTOCOL_2[f"{kind.__module__}.{kind.__qualname__}"].split()


@pytest.mark.parametrize(
    ("theirs", "oldest", "together"),
    [
        (PROTOCOL, OLDEST_PROTOCOL, True),
        (OLDEST_PROTOCOL, 0, True),
        (OLDEST_PROTOCOL - 1, 1, False),
        (PROTOCOL + 1, PROTOCOL, True),
        (PROTOCOL + 2, PROTOCOL + 1, False),
    ],
)
def test_who_gets_along(theirs: int, oldest: int, together: bool) -> None:
    assert get_along(theirs, oldest) is together
    assert Identity(theirs, "c", oldest).serves("c") is together
    assert not Identity(theirs, "c", oldest).serves("another")
