"""Ranks in processes of their own that can be killed and stopped. Forked from a process that has loaded torch once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from workers.native.library import load_library
from workers.parallel import Communicator, join_store, open_store

HOST = "127.0.0.1"
CPU = torch.device("cpu")
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.model.forked_rank"])


def join(address: str, rank: int, world: int, timeout_s: float) -> Communicator:
    """Rank `rank` over shared memory, at the store that is open at `address`."""
    store = join_store(address)
    made = Communicator.connect(store, rank, world, host=HOST, device=CPU, timeout_s=timeout_s, library=load_library())
    assert made.transport == "shared memory"
    return made


def add_up(comm: Communicator) -> None:
    """One collective after the other, until one fails."""
    while True:
        comm.all_reduce(torch.ones(5000))


def wait_for_plans(comm: Communicator) -> None:
    """A follower whose leader says nothing."""
    comm.receive_plan()


def say_nothing(comm: Communicator) -> None:
    """A leader without plans."""
    time.sleep(60)


class ForkedRank:
    """Rank `rank` of `world`, which does `work` until it fails; `last_words` are what failed."""

    def __init__(
        self, address: str, rank: int, world: int, work: Callable[[Communicator], None], timeout_s: float = 30.0
    ) -> None:
        self._words, theirs = _server.Pipe(duplex=False)
        self._met = False
        self._process = _server.Process(target=_live, args=(address, rank, world, work, timeout_s, theirs))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid
        return self._process.pid

    def wait_until_met(self) -> None:
        """Until it and the others have found each other."""
        if not self._met:
            assert self._words.poll(30)
            assert self._words.recv() == "met"
            self._met = True

    def kill(self) -> None:
        """End it with SIGKILL, and wait until it has ended."""
        self._process.kill()
        self.resume()
        self._process.join(10)

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def last_words(self, timeout_s: float = 10.0) -> str:
        """What failed there."""
        self.wait_until_met()
        assert self._words.poll(timeout_s)
        words: str = self._words.recv()
        return words


def _live(
    address: str,
    rank: int,
    world: int,
    work: Callable[[Communicator], None],
    timeout_s: float,
    words: Connection,
) -> None:
    signal.alarm(120)  # whatever becomes of the test
    torch.set_num_threads(1)
    comm = join(address, rank, world, timeout_s)
    words.send("met")
    try:
        work(comm)
    except RuntimeError as error:
        words.send(str(error))
        comm.close()


def meeting() -> tuple[object, str]:
    """A store to hold on to, and its address."""
    return open_store(HOST)
