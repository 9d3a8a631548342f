"""Incarnation: the rank actors of one group from their start to their end. When one dies all do; another incarnation
replaces them.

Carries calls to ranks and watches them. Knows neither the coordinator nor Serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.bundles import Resources
from cluster.coordination.cards import GroupCard, RankCard
from cluster.registry import NAMESPACE
from workers.actors import RankActor
from workers.orders import Orders
from workers.plan import GroupDead, GroupReport, Limits
from workers.rank import RankFacts
from workers.settings import GroupSettings
from workers.stacks import RankState

PLACE_S = 30.0
"""A rank whose process has not come up after so long is given up."""
FIRST_TOKEN_S = 60.0
"""What the first step may take beyond what any may: threads and kernels warm up in it."""
ANSWER_S = 1.5
"""How long a rank may take to say where it is."""
STOP_S = 10.0

Say = Callable[[str], Awaitable[None]]


class CannotStart(RuntimeError):
    """The group did not come up; the message is for the operator."""


class NoProgress(Exception):
    """The ranks live, but their steps do not end."""


class Incarnation:
    """Use `start`. `name` is unique among incarnations, `card` what to tell the coordinator. A step that takes longer
    than `step_s` is a hang."""

    def __init__(self, name: str, ranks: list[ActorHandle], card: GroupCard, step_s: float) -> None:
        self.name = name
        self.card = card
        self._ranks = ranks
        self._step_s = step_s
        self._verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        calls = [ranks[0].drive.remote(), *(rank.follow.remote() for rank in ranks[1:])]
        self._lives = [asyncio.wrap_future(call.future()) for call in calls]

    @classmethod
    async def start(
        cls,
        group: str,
        name: str,
        settings: GroupSettings,
        place: PlacementGroup,
        bundles: Sequence[Resources],
        say: Say,
        *,
        restarts: int = 0,
    ) -> Incarnation:
        """Bring up the ranks in `place` (rank r in bundle r + 1) until one real token has come out. `restarts` of the
        group came before. Raises CannotStart, and leaves no rank behind then."""
        ranks = [_create(rank, name, settings, place, bundles[rank + 1]) for rank in range(len(bundles) - 1)]
        try:
            return await cls._bring_up(group, name, settings, ranks, say, restarts)
        except BaseException as error:
            _kill(ranks)
            if isinstance(error, Exception) and not isinstance(error, CannotStart):
                raise CannotStart(reason(error)) from error
            raise

    @classmethod
    async def _bring_up(
        cls, group: str, name: str, settings: GroupSettings, ranks: list[ActorHandle], say: Say, restarts: int
    ) -> Incarnation:
        await say("starting processes")
        try:
            await asyncio.wait_for(_all(rank.modules.remote(()) for rank in ranks), PLACE_S)
        except TimeoutError:
            raise CannotStart(f"the {len(ranks)} rank processes did not come up within {PLACE_S:.0f} s") from None
        address = await ranks[0].open_store.remote() if len(ranks) > 1 else None
        await say("loading weights")
        facts: list[RankFacts] = await _all(rank.load.remote(address) for rank in ranks)
        blocks = min(fact.blocks for fact in facts)
        card = _card(group, name, settings, facts, blocks, restarts)
        await say(f"allocating the KV pool, for {card.kernels}")
        await _all(rank.build.remote(blocks, group) for rank in ranks)
        incarnation = cls(name, ranks, card, settings.step_timeout_s)
        await say("generating a first token")
        await incarnation._warm_up()
        return incarnation

    async def _warm_up(self) -> None:
        """The first token, or the reason why a rank died before it."""
        token = asyncio.wrap_future(self._ranks[0].warm_up.remote().future())
        within = self._step_s + FIRST_TOKEN_S
        done, _ = await asyncio.wait([token, *self._lives], timeout=within, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise CannotStart(f"no first token came out within {within:.0f} s")
        for life in self._lives:
            if life.done():
                raise CannotStart(reason(life.exception() or GroupDead("a rank stopped")))
        token.result()

    async def end(self) -> str:
        """Wait until a rank has ended or the group has been given up, and say why."""
        done, _ = await asyncio.wait([*self._lives, self._verdict], return_when=asyncio.FIRST_COMPLETED)
        if self._verdict in done:
            return self._verdict.result()
        causes = [reason(error) for life in done if (error := life.exception())]
        return causes[0] if causes else "a rank stopped"

    def give_up(self, why: str) -> None:
        """Whatever the ranks do, this group counts as dead."""
        if not self._verdict.done():
            self._verdict.set_result(why)

    async def examine(self) -> tuple[tuple[RankState | str, ...], str]:
        """Where each rank is, or why it does not say; and what rank 0's flight recorder holds."""
        states = [_answer(rank.state.remote()) for rank in self._ranks]
        recording = _answer(self._ranks[0].recording.remote())
        *found, lines = await asyncio.gather(*states, recording)
        silent = isinstance(lines, Silence)
        return tuple(str(state) if isinstance(state, Silence) else state for state in found), "" if silent else lines

    async def enter(self, epoch: int) -> None:
        """The coordinator has given this incarnation `epoch`: it takes subscribers from now on."""
        await self._ranks[0].enter.remote(epoch)

    async def report(
        self, limits: Limits | None, void: Sequence[str], full: bool, orders: Orders | None = None
    ) -> GroupReport:
        """Pass on the coordinator's last reply and fetch the news. Rank 0 answers between two steps: NoProgress when
        one takes too long."""
        try:
            report = self._ranks[0].report.remote(limits, tuple(void), full, orders)
            return await asyncio.wait_for(report, self._step_s)
        except TimeoutError:
            raise NoProgress(f"no step ended within {self._step_s:.0f} s") from None

    def log_level(self, level: str) -> None:
        """How much the ranks say from now on; one that cannot be told is dying."""
        for rank in self._ranks:
            rank.log_level.remote(level)

    async def drain(self) -> bool:
        """Refuse new requests; whether none is left."""
        return bool(await self._ranks[0].drain.remote())

    async def stop(self) -> None:
        """Let the ranks end after the step they are in, then end their processes."""
        await asyncio.wait(
            [asyncio.ensure_future(_quietly(rank.stop.remote())) for rank in self._ranks], timeout=STOP_S
        )
        await asyncio.wait(self._lives, timeout=STOP_S)
        self.kill()

    def kill(self) -> None:
        """End the processes now."""
        for life in self._lives:
            life.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen: killing is no news
        _kill(self._ranks)


class Silence(str):
    """Why a rank did not answer."""


def reason(error: BaseException) -> str:
    """What a failed call says, without Ray's traceback around it."""
    cause = getattr(error, "cause", None)
    inner = cause if isinstance(cause, BaseException) else error
    return str(inner) if isinstance(inner, ValueError | RuntimeError) else f"{type(inner).__name__}: {inner}"


def _create(rank: int, name: str, settings: GroupSettings, place: PlacementGroup, bundle: Resources) -> ActorHandle:
    threads = {"OMP_NUM_THREADS": str(settings.threads)} if settings.threads else {}
    actor: Any = RankActor
    options = actor.options(
        name=f"{name}-rank{rank}",
        namespace=NAMESPACE,
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        memory=bundle.get("memory"),
        scheduling_strategy=PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=rank + 1),
        runtime_env={"env_vars": threads},
    )
    return options.remote(rank, settings)


def _card(
    group: str, name: str, settings: GroupSettings, facts: Sequence[RankFacts], blocks: int, restarts: int
) -> GroupCard:
    return GroupCard(
        group=group,
        models=settings.model_names,
        address=f"{name}-rank0",
        blocks=blocks,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=facts[0].max_model_len,
        windows=facts[0].windows,
        ahead=settings.ahead,
        ranks=tuple(
            RankCard(
                rank=fact.rank,
                pid=fact.pid,
                node=fact.node,
                threads=fact.threads,
                device=fact.device,
                pool_bytes=fact.block_bytes * blocks,
                kernel=fact.kernel,
                kernel_why=fact.kernel_why,
                block_bytes=fact.block_bytes,
                kv=fact.kv,
            )
            for fact in facts
        ),
        revision=settings.revision,
        restarts=restarts,
    )


async def _all(calls: Any) -> list[Any]:
    return await asyncio.gather(*calls)


async def _answer(call: Any) -> Any:
    try:
        return await asyncio.wait_for(call, ANSWER_S)
    except TimeoutError:
        return Silence(f"no answer within {ANSWER_S:.1f} s")
    except RayError as error:
        return Silence(reason(error))


async def _quietly(call: Any) -> None:
    await asyncio.gather(call, return_exceptions=True)


def _kill(ranks: Sequence[ActorHandle]) -> None:
    for rank in ranks:
        ray.kill(rank)
