"""What a group asks of Ray, and the sentence that says why it gets no place."""

from __future__ import annotations

import pytest

from cluster.bundles import group_bundles, shortage, take, total


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_all_ranks_of_a_machine_fit_on_its_cores(ranks: int, groups: int) -> None:
    bundles = group_bundles(ranks, device="cpu", cores=2, all_ranks=ranks * groups)
    assert len(bundles) == ranks + 1
    assert shortage(bundles, groups, {"here": {"CPU": 2.0}}) is None


def test_a_gpu_rank_asks_for_a_whole_gpu() -> None:
    bundles = group_bundles(4, device="cuda", cores=16, all_ranks=4)
    assert total(bundles)["GPU"] == 4.0
    assert shortage(bundles, 1, {"here": {"CPU": 16.0, "GPU": 4.0}}) is None


def test_a_shortage_names_what_is_wanted_and_what_each_node_has() -> None:
    bundles = group_bundles(2, device="cuda", cores=8, all_ranks=2)
    said = shortage(bundles, 1, {"a": {"CPU": 8.0}, "b": {"CPU": 4.0, "GPU": 1.0}})
    assert said == "a group wants 2.01 CPUs, 2 GPUs on one node; a has 8 CPUs, 0 GPUs; b has 4 CPUs, 1 GPUs"


def test_memory_is_shown_in_gib() -> None:
    bundles = group_bundles(1, device="cpu", cores=2, all_ranks=1, memory=3 * 2**30)
    said = shortage(bundles, 1, {"a": {"CPU": 2.0, "memory": float(2**30)}})
    assert said is not None and "3 GiB of memory" in said and "a has 2 CPUs, 1 GiB of memory" in said


def test_a_group_does_not_straddle_nodes_and_several_groups_spread() -> None:
    bundles = group_bundles(2, device="cuda", cores=8, all_ranks=4)
    assert shortage(bundles, 1, {"a": {"CPU": 8.0, "GPU": 1.0}, "b": {"CPU": 8.0, "GPU": 1.0}}) is not None
    nodes = {"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 8.0, "GPU": 2.0}}
    assert shortage(bundles, 2, nodes) is None
    said = shortage(bundles, 3, nodes)
    assert said is not None and said.startswith("3 groups want each ")


def test_no_node_at_all() -> None:
    said = shortage(group_bundles(1, device="cpu", cores=2, all_ranks=1), 1, {})
    assert said is not None and said.endswith("there is no node")


def test_a_group_that_may_goes_over_nodes_rank_by_rank() -> None:
    bundles = group_bundles(8, device="cuda", cores=32, all_ranks=8)
    four = {"CPU": 32.0, "GPU": 4.0}
    assert shortage(bundles, 1, {"a": four, "b": four}) is not None
    assert shortage(bundles, 1, {"a": four, "b": four}, across=True) is None
    assert shortage(bundles, 2, {name: four for name in "abcd"}, across=True) is None
    said = shortage(bundles, 1, {"a": four, "b": {"CPU": 32.0, "GPU": 3.0}}, across=True)
    assert said is not None
    assert said.startswith("a group wants 8.01 CPUs, 8 GPUs over several nodes, 1 CPUs, 1 GPUs for each rank; a has 32")


def test_a_group_that_may_go_over_nodes_is_on_one_where_that_has_room() -> None:
    bundles = group_bundles(2, device="cuda", cores=8, all_ranks=2)
    left = {"a": {"CPU": 8.0, "GPU": 1.0}, "b": {"CPU": 8.0, "GPU": 2.0}}
    assert take(bundles, left, across=True)
    assert left["a"] == {"CPU": 8.0, "GPU": 1.0} and left["b"]["GPU"] == 0.0


def test_a_group_that_finds_no_room_takes_nothing() -> None:
    bundles = group_bundles(3, device="cuda", cores=8, all_ranks=3)
    left = {"a": {"CPU": 8.0, "GPU": 1.0}, "b": {"CPU": 8.0, "GPU": 1.0}}
    assert not take(bundles, left, across=True)
    assert left == {"a": {"CPU": 8.0, "GPU": 1.0}, "b": {"CPU": 8.0, "GPU": 1.0}}
