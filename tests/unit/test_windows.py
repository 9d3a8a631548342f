"""Sliding windows: blocks behind the window come back, hits need the last window only, and what a sequence will hold is
known beforehand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.extent import UNBOUNDED, Extent
from kvstore.store import KVStore
from kvstore.table import GONE
from tests.shadow import ShadowGroup, expected_output
from workers.forecast import committed_blocks
from workers.plan import Draw, Limits
from workers.scheduler import Scheduler
from workers.sequence import Request, Sampling, Sequence

SIZE = 4
WINDOWS = st.lists(st.sampled_from([None, 1, 3, 8, 21]), min_size=1, max_size=4)


@given(WINDOWS, st.integers(1, 30), st.integers(1, 400))
def test_tokens_for_is_the_inverse_of_blocks_for(windows: list[int | None], ahead: int, blocks: int) -> None:
    extent = Extent(SIZE, tuple(windows), ahead)
    tokens = extent.tokens_for(blocks)
    assert extent.blocks_for(min(tokens, 10**6)) <= blocks
    assert (tokens == UNBOUNDED) == (None not in windows and extent.blocks_for(10**6) <= blocks)
    assert tokens == UNBOUNDED or extent.blocks_for(tokens + 1) > blocks
    longest = extent.longest_for(blocks)
    assert extent.most_for(min(longest, 10**6)) <= blocks and longest <= tokens
    assert longest == UNBOUNDED or extent.most_for(longest + 1) > blocks


def scheduler(blocks: int, windows: tuple[int | None, ...], chunk: int = 16) -> Scheduler:
    store = KVStore(blocks, SIZE, windows=windows, ahead=chunk)
    return Scheduler(store, Limits(4, chunk, chunk), max_model_len=10**6, watermark=0.0)


def run(engine: Scheduler, group: ShadowGroup, request: Request) -> tuple[list[int], int]:
    """What `request` generates, and the most blocks that are held meanwhile."""
    engine.add(request, 0.0)
    output: list[int] = []
    most = 0
    while engine.live:
        plan = engine.schedule(0.0)
        assert plan is not None
        for event in engine.apply(group.wait(group.launch(plan)), 0.0):
            output.extend(event.tokens)
        most = max(most, engine.store.pool.held)
    engine.store.check()
    return output, most


def test_a_long_generation_in_a_window_holds_no_more_than_a_short_one() -> None:
    """The pool has room for a fiftieth of the sequence."""
    for windows in ((9,), (9, 14)):
        engine = scheduler(24, windows)
        group = ShadowGroup(24, SIZE, windows=windows)
        prompt = tuple(range(7))
        output, most = run(engine, group, Request("r", prompt, Sampling(5000), b"n"))
        assert output == expected_output(prompt, 5000, Draw(), 97, frozenset())
        assert most <= engine.store.blocks_for(5000) <= 24 < 5000 // SIZE // 50


def test_a_long_prompt_in_a_window_is_prefilled_in_a_small_pool() -> None:
    engine = scheduler(12, (9,), chunk=8)
    prompt = tuple(i % 89 for i in range(700))
    output, most = run(engine, ShadowGroup(12, SIZE, windows=(9,)), Request("r", prompt, Sampling(5), b"n"))
    assert output == expected_output(prompt, 5, Draw(), 97, frozenset()) and most <= 12


def test_full_and_windowed_layers_hold_what_each_needs() -> None:
    engine = scheduler(80, (None, 9))
    prompt = tuple(range(97))
    run(engine, ShadowGroup(80, SIZE, windows=(None, 9)), Request("r", prompt, Sampling(100), b"n"))
    assert engine.store.blocks_for(197) == 50 + engine.store.extent.cap(9)
    assert engine.obstacle(Request("x", prompt, Sampling(400), b"n")) is not None


def test_a_hit_needs_the_last_window_of_a_windowed_group_only() -> None:
    store = KVStore(40, SIZE, windows=(None, 6))
    tokens = list(range(41))
    table = store.adopt(b"n", tokens, [], 0.0)
    for start in range(0, 41, 4):
        stop = min(start + 4, 41)
        assert store.grow(table, start, stop, 0.0) == ()
        store.seal(table, tokens, stop, 0.0)
        store.slide(table, stop, 0.0)
    assert table.gone == [0, 9] and table.held == 11 + 2
    store.release(table, 0.0)
    again = store.adopt(b"n", tokens, [], 0.0)
    assert again.cached == 40 and again.blocks[1][:8] == [GONE] * 8 and GONE not in again.blocks[1][8:]
    store.release(again, 0.0)
    # The last window of a shorter head may have been taken for other uses: then the longest one that is left counts.
    for index in (7, 8):
        block = store._cache.index.block(1, again.keys[index])
        assert block is not None
        store._cache.discard(block)
        store.pool.soil(block)
    assert store.match(b"n", tokens, [], 0.0).blocks == 7
    store.check()


def test_what_windows_hold_is_foreseen() -> None:
    store = KVStore(400, SIZE, windows=(None, 9), ahead=1)
    one = Sequence(Request("r", tuple(range(40)), Sampling(400), b"n"), 0.0)
    assert committed_blocks([one], store) == store.blocks_for(440) == 110 + 3
    granted = Sequence(Request("r", tuple(range(40)), Sampling(400), b"n", granted_blocks=store.blocks_for(80)), 0.0)
    assert committed_blocks([granted], store) == 20 + 3
