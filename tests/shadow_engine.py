"""The real engine over shadow ranks, as simulations of a whole service use it: small pools, no step thread, and a
record of what it accepted. Whoever drives it calls `turn`."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.store import KVStore
from tests.shadow import ShadowGroup
from tests.shadow import expected_output as expected_tokens
from workers.engine import Engine
from workers.plan import Finish, Limits, StepPlan
from workers.scheduler import Scheduler
from workers.sequence import Request, Sampling

VOCABULARY = 50


def expected_output(prompt: tuple[int, ...], sampling: Sampling) -> tuple[tuple[int, ...], Finish]:
    """All tokens of a generation, and how it ends."""
    most, draw, stops = sampling.max_tokens, sampling.draw(0), sampling.stop_ids
    output = expected_tokens(prompt, most, draw, VOCABULARY, stops, sampling.penalties)
    return tuple(output), Finish.STOP if output and output[-1] in sampling.stop_ids else Finish.LENGTH


class ShadowEngine(Engine):
    """`blocks` of `block_size` tokens that live for `ttl` seconds unused, `max_num_seqs` slots, `chunk` prompt tokens
    per step and sequence, `depth` steps in flight; `short` says for which plans with rows the ranks find no memory."""

    def __init__(
        self,
        *,
        name: str,
        epoch: int,
        blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 8,
        chunk: int = 64,
        lease_s: float = 5.0,
        audit_s: float = 30.0,
        ttl: float = 300.0,
        depth: int = 1,
        short: Callable[[StepPlan], bool] | None = None,
    ) -> None:
        self.blocks, self.block_size, self.max_num_seqs = blocks, block_size, max_num_seqs
        self.store = KVStore(blocks, block_size, ttl=ttl)
        scheduler = Scheduler(
            self.store, Limits(max_num_seqs, chunk + max_num_seqs, chunk), max_model_len=blocks * block_size
        )
        group = ShadowGroup(blocks, block_size, vocabulary=VOCABULARY, short=short)
        super().__init__(scheduler, group, name=name, epoch=epoch, depth=depth, lease_s=lease_s, audit_s=audit_s)
        self.accepted_keys: list[tuple[tuple[str, int], str]] = []

    @property
    def held(self) -> int:
        """Blocks in use."""
        return self.store.pool.held

    def submit(self, ingress: str, request: Request) -> None:
        super().submit(ingress, request)
        self.accepted_keys.append(((request.id, request.attempt), request.grant))
