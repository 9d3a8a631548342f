"""A running service from outside: streams, clients that leave, load over groups, what listens, what is loaded."""

from __future__ import annotations

import ipaddress
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import psutil
import pytest
import ray
from ray import serve

from tests.ray import workload
from tests.ray.stage import Stage, eventually, listeners

CLIENTS = 50


def test_a_stream_brings_the_same_text_as_a_whole_answer(tiny: Stage) -> None:
    whole = tiny.complete("Once upon a time", max_tokens=60)["choices"][0]
    chunks = list(tiny.stream("Once upon a time", max_tokens=60))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length" == whole["finish_reason"]
    assert len(chunks) > 5, "streamed in pieces, not at once"


def abandon(tiny: Stage) -> None:
    """Fifty clients read a little of a long answer and leave; then every block must be back."""

    def leave(client: int) -> int:
        return len(list(islice(tiny.stream([client + 3] * 40, max_tokens=6000), 3)))

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert set(pool.map(leave, range(CLIENTS))) == {3}
    eventually(lambda: tiny.total("held") == 0 and tiny.total("running") == 0, 10)
    eventually(lambda: tiny.total("grants") == 0 and tiny.total("committed") == 0, 10)
    assert tiny.total("free") + tiny.total("idle") + tiny.total("dirty") == tiny.total("total")


def test_fifty_clients_that_leave_mid_stream_give_every_block_back(tiny: Stage) -> None:
    abandon(tiny)


@pytest.mark.long
def test_two_thousand_clients_that_leave_mid_stream_give_every_block_back(tiny: Stage) -> None:
    for _ in range(40):
        abandon(tiny)


def test_two_groups_share_the_load(tiny: Stage) -> None:
    before = {group["group"]: group["epoch"] for group in tiny.groups()}
    assert len(before) == 2
    with ThreadPoolExecutor(16) as pool:
        work = [pool.submit(lambda n: list(tiny.stream([n + 3] * 30, max_tokens=300)), n) for n in range(16)]
        eventually(lambda: all(group["running"] >= 5 for group in tiny.groups()), 20)
        assert all(len(answer.result()) > 1 for answer in work)


def test_nothing_listens_beyond_loopback(tiny: Stage) -> None:
    found = listeners()
    assert any(port == tiny.shown.port for _, _, port in found if tiny.shown)
    beyond = [entry for entry in found if not _is_loopback(entry[1])]
    assert not beyond


def test_an_ingress_reads_from_each_group_over_a_connection_of_its_own(tiny: Stage) -> None:
    """Ray's way to a process is one connection to one port; ours is another one."""
    tiny.complete("hello", max_tokens=2)
    (ingress,) = workload.replicas("ingress")
    ranks = {group["ranks"][0]["pid"] for group in tiny.groups()}

    def ways() -> list[int]:
        held = {entry.raddr for entry in ingress.net_connections(kind="inet") if entry.status == "ESTABLISHED"}
        open_at = [psutil.Process(pid).net_connections(kind="inet") for pid in ranks]
        return [len({e.laddr for e in entries if e.status == "LISTEN"} & held) for entries in open_at]

    assert eventually(lambda: max(ways()) >= 2)


def test_an_ingress_loads_neither_torch_nor_transformers(tiny: Stage) -> None:
    handle = serve.get_deployment_handle("ingress", "tidegate")
    names = ("torch", "transformers", "fastapi")
    assert handle.modules.remote(names).result(timeout_s=20) == ("fastapi",)


def test_a_rank_runs_with_the_threads_it_was_given(tiny: Stage) -> None:
    assert {rank["threads"] for group in tiny.groups() for rank in group["ranks"]} == {1}


def test_calls_are_answered_while_many_streams_are_read(tiny: Stage) -> None:
    with ThreadPoolExecutor(24) as pool:
        work = [pool.submit(lambda n: list(tiny.stream([n + 3] * 20, max_tokens=200)), n) for n in range(24)]
        eventually(lambda: tiny.total("running") >= 20, 20)
        names = {group["group"]: group["reported_s"] for group in tiny.groups()}
        assert max(names.values()) < 3.0, "reports came through"
        assert ray.get(_rank_zero(tiny).renew.remote("nobody"), timeout=3) is False
        for answer in work:
            answer.result()


def _rank_zero(stage: Stage) -> ray.actor.ActorHandle:
    actors = ray.util.list_named_actors(all_namespaces=True)
    name = next(actor["name"] for actor in actors if actor["name"].endswith("-rank0"))
    return ray.get_actor(name, "tidegate")


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
