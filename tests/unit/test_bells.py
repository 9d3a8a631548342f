"""Bells: a ring from any thread wakes whoever listens in whatever event loop, and none gets lost."""

from __future__ import annotations

import asyncio
import threading

from cluster.bells import Bells


async def rung(event: asyncio.Event) -> bool:
    try:
        await asyncio.wait_for(event.wait(), 5.0)
    except TimeoutError:
        return False
    return True


def test_a_ring_wakes_all_that_listen_to_that_name_in_their_own_loops() -> None:
    bells, listening, heard = Bells(), threading.Barrier(4), []

    async def listen(name: str, seconds: float) -> None:
        with bells.listen(name) as event:
            listening.wait()
            try:
                await asyncio.wait_for(event.wait(), seconds)
                heard.append(name)
            except TimeoutError:
                heard.append(f"not {name}")

    names = (("a", 5.0), ("a", 5.0), ("b", 0.2))
    threads = [threading.Thread(target=asyncio.run, args=(listen(*name),)) for name in names]
    for thread in threads:
        thread.start()
    listening.wait()
    bells.ring(["a", "nobody"])
    for thread in threads:
        thread.join()
    assert sorted(heard) == ["a", "a", "not b"]


def test_no_ring_gets_lost_between_looking_and_waiting() -> None:
    bells, box, seen = Bells(), [0], 0

    def ringer() -> None:
        for _ in range(2000):
            box[0] += 1
            bells.ring(["a"])

    async def reader() -> None:
        nonlocal seen
        with bells.listen("a") as event:
            thread = threading.Thread(target=ringer)
            thread.start()
            while seen < 2000:
                event.clear()
                seen = box[0]
                if seen < 2000:
                    assert await rung(event), f"stuck at {seen}"
            thread.join()

    asyncio.run(reader())
    assert seen == 2000


def test_who_listens_no_more_is_forgotten() -> None:
    bells = Bells()

    async def case() -> None:
        with bells.listen("a") as first, bells.listen("a") as second:
            bells.ring(["a"])
            assert await rung(first) and await rung(second)
        with bells.listen("a") as third:
            assert not third.is_set(), "a ring is for those who listen then"

    asyncio.run(case())
    assert not bells._listeners
    bells.ring(["a"])
