"""Keys by channel: the blocks of what is open come and go with their sequence, are copied for a fork, never cached."""

from __future__ import annotations

from kvstore.extent import Extent
from kvstore.layout import KVLayout, LayerKV, Precision
from kvstore.store import KVStore
from kvstore.table import GONE
from tests.shadow import ShadowGroup, expected_output
from workers.forecast import committed_blocks
from workers.plan import Draw, Limits
from workers.scheduler import Scheduler
from workers.sequence import Request, Sampling, Sequence

SIZE = 4
WINDOWS = tuple(group.window for group in KVLayout(SIZE, (LayerKV.pair(1, 64, Precision.INT4_CHANNEL),) * 2).groups)


def write(store: KVStore, tokens: list[int], chunk: int) -> tuple[object, int]:
    """A table with all of `tokens`, in chunks; and the most blocks that it held."""
    table, most = store.adopt(b"n", tokens, [], 0.0), 0
    for start in range(table.cached, len(tokens), chunk):
        stop = min(start + chunk, len(tokens))
        assert store.grow(table, start, stop, 0.0) == ()
        most = max(most, table.held)
        store.seal(table, tokens, stop, 0.0)
        store.slide(table, stop, 0.0)
    return table, most


def test_a_sequence_has_one_open_block_in_either_half_and_a_chunk_passes_through_more() -> None:
    store = KVStore(64, SIZE, windows=WINDOWS, ahead=16)
    tokens = list(range(42))
    table, most = write(store, tokens, 16)
    assert table.gone == [0, 10, 10] and table.held == 11 + 2
    assert store.blocks_for(42) == 11 + 2 * 2 < most <= store.extent.most_for(42) == 11 + 2 * 5
    assert store.extent.longest_for(19) == 36 < store.extent.tokens_for(19) == 60
    store.check()


def test_what_is_open_is_never_cached_and_a_hit_begins_without_it() -> None:
    store = KVStore(64, SIZE, windows=WINDOWS, ahead=12)
    tokens = list(range(42))
    table, _ = write(store, tokens, 12)
    store.release(table, 0.0)
    assert store.report().idle == 10 and store.extent.cached_tokens(10) == 40
    again = store.adopt(b"n", tokens, [], 0.0)
    assert again.cached == 40 and again.blocks[1] == again.blocks[2] == [GONE] * 10
    assert store.grow(again, 40, 42, 0.0) == () and again.held == 13
    store.release(again, 0.0)
    store.check()


def test_a_fork_copies_the_open_block_before_either_writes_to_it() -> None:
    store = KVStore(64, SIZE, windows=WINDOWS, ahead=12)
    table, _ = write(store, list(range(42)), 12)
    other = store.fork(table)
    copies = store.grow(other, 42, 43, 0.0)
    assert copies is not None and [source for source, _ in copies] == [blocks[10] for blocks in table.blocks]
    assert store.grow(table, 42, 43, 0.0) == ()
    assert all(a[10] != b[10] for a, b in zip(table.blocks, other.blocks, strict=True))
    store.check()


def test_a_purge_forgets_the_table_of_what_it_took_and_no_other() -> None:
    """What is open was never indexed: nothing is lost by its not being there."""
    store = KVStore(64, SIZE, windows=WINDOWS, ahead=12)
    first, second = list(range(20)), list(range(100, 121))
    kept = store.adopt(b"m", second, [], 0.0)
    assert store.grow(kept, 0, 21, 0.0) == ()
    store.seal(kept, second, 21, 0.0)
    lost, _ = write(store, first, 12)
    store.purge(b"n")
    assert lost.forgotten and not kept.forgotten
    store.check()


def test_a_request_that_is_not_refused_finds_room_for_its_chunks_when_it_is_alone() -> None:
    prompt, longest = tuple(i % 89 for i in range(60)), 0
    for blocks in range(6, 40):
        store = KVStore(blocks, SIZE, windows=WINDOWS, ahead=32)
        engine = Scheduler(store, Limits(4, 16, 16), max_model_len=10**6, watermark=0.0)
        group = ShadowGroup(blocks, SIZE, windows=WINDOWS)
        fits = [n for n in range(1, 60) if engine.obstacle(Request("x", prompt[:n], Sampling(5), b"n")) is None]
        assert bool(fits) == (Extent(SIZE, WINDOWS, 32).longest_for(blocks) >= 6)
        for length in fits[-1:]:
            longest = length
            engine.add(Request("r", prompt[:length], Sampling(5), b"n"), 0.0)
            output: list[int] = []
            while engine.live:
                plan = engine.schedule(0.0)
                assert plan is not None
                for event in engine.apply(group.wait(group.launch(plan)), 0.0):
                    output.extend(event.tokens)
                store.check()
            assert output == expected_output(prompt[:length], 5, Draw(), 97, frozenset())
    assert longest == 59


def test_what_running_sequences_are_counted_with() -> None:
    store = KVStore(400, SIZE, windows=WINDOWS, ahead=64)
    one = Sequence(Request("r", tuple(range(40)), Sampling(400), b"n"), 0.0)
    assert committed_blocks([one], store) == store.blocks_for(440) == 110 + 2 * 2
    granted = Sequence(Request("r", tuple(range(40)), Sampling(400), b"n", granted_blocks=store.blocks_for(80)), 0.0)
    assert committed_blocks([granted], store) == 20 + 2 * 2
