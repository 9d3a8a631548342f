"""Runner: one rank's model and KV pool; a plan in, sampled tokens out. It keeps no sequence state.

Before a step's first collective the ranks make sure that each of them has the memory for it: one "no" and none of them
computes a row. So running out of memory costs a step, not the group.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvstore.layout import KVLayout, Precision
from kvstore.precisions import PrecisionMap
from kvstore.shards import split_evenly
from workers.attention.backend import AttentionBackend
from workers.attention.tiles import BLOCK, BUCKET_SLOTS, TILE
from workers.batch import Batch, Batcher
from workers.demand import Demand
from workers.footprint import can_allocate, peak_bytes
from workers.kvpool import KVPool
from workers.logprobs import Logprobs
from workers.models.factory import Spec, load_model
from workers.models.spec import ModelSpec
from workers.parallel import Communicator
from workers.penalties import bend, bent_rows
from workers.plan import Draw, Row, StepPlan, StepResult
from workers.scoring import SLICE, Scorer
from workers.selection import Wish, choose_kernels

_SCALES = (0.5, 4.0)
"""How far a measured step may move the arithmetic: a measurement on a busy CPU is rough."""


class Runner:
    """Rank `comm.rank` of the model in `folder`, loaded on construction.

    `precision` is the KV cache's; `dtype` the weights' ("fp32", "bf16", "fp16"; their values are rounded to it);
    `wish` is about its kernels; `checks` and `revision` about what a model that is not native remembers (see
    load_model). Raises Unsupported, WeightError, or ValueError for more ranks than query
    heads. `allocate` must come before the first `run`. Every rank of a group runs the same plans in the same order.
    `drops` counts the steps for which a rank had no memory; `last_step` is the number of the last plan that came.
    """

    def __init__(
        self,
        folder: Path,
        spec: Spec,
        *,
        comm: Communicator,
        block_size: int,
        precision: PrecisionMap,
        dtype: str,
        device: torch.device | str = "cpu",
        max_num_seqs: int,
        max_num_batched_tokens: int,
        wish: Wish | None = None,
        checks: Path | None = None,
        revision: str = "",
    ) -> None:
        self.device = torch.device(device)
        self.layout: KVLayout = spec.layout(block_size, precision, comm.world)[comm.rank]
        self._comm = comm
        self._max_rows = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._reach = spec.context_length
        self.choice = choose_kernels(
            dtype, self.device, self.layout, wish, spec if isinstance(spec, ModelSpec) else None
        )
        self._kernels = self.choice.kernels
        self._sample = self._kernels.sampler()
        self._batcher = Batcher(block_size, self.device)
        self._attention: AttentionBackend | None = None
        self._scale = 1.0
        self.drops = 0
        self.last_step = -1
        self.pool: KVPool | None = None
        with torch.inference_mode():
            self._model = load_model(
                spec,
                folder,
                comm=comm,
                kernels=self._kernels,
                dtype=dtype,
                device=self.device,
                weight_precision=wish.weight_precision if wish else "auto",
                checks=checks,
                revision=revision,
            )
        self._scorer = Scorer(comm, self._model.logits, self._model.widths, self.device)
        self._demand = self._demand_of(spec)

    def allocate(self, blocks: int, layout: KVLayout | None = None) -> None:
        """Make the KV pool of `blocks` blocks, all zeros; an earlier pool is let go first. Another `layout` than the
        runner's own must be one of the same model that these kernels can read; else Unsupported."""
        if blocks < 1:
            raise ValueError(f"a KV pool needs at least 1 block, got {blocks}")
        self.pool = self._attention = None
        self.pool = KVPool(layout or self.layout, blocks, self.device)
        self._attention = self._kernels.attention(self.pool, self._model.rules)

    def profile(self) -> int:
        """Bytes that the largest step takes beyond weights and pool. All ranks call it together, before `allocate`.

        What it finds scales the arithmetic by which `reserve` goes.
        """
        self.allocate(1)
        plan = self._largest()
        try:
            found = peak_bytes(lambda: self.run(plan), self.device)
        finally:
            self.pool = self._attention = None
        self._scale = min(_SCALES[1], max(_SCALES[0], found / sum(self._demand.buffers(plan))))
        return found

    def step(self, plan: StepPlan) -> StepResult:
        """`run`, if every rank has the memory for it; else a result that says that the rows were dropped.

        A plan that builds on a step that was dropped is dropped too, without asking. What the plan copies and zeroes is
        done in any case. Memory that runs out later, after the ranks have agreed, is an error.
        """
        if plan.step >= 0:
            self.last_step = plan.step
        self._turn_over(plan)
        if plan.drops < self.drops:
            return StepResult(plan.step, (), dropped=bool(plan.rows))
        if plan.rows and not self._comm.min_flag(int(self.reserve(plan))):
            self.drops += 1
            return StepResult(plan.step, (), dropped=True, short=True)
        return self.compute(plan)

    def reserve(self, plan: StepPlan) -> bool:
        """Whether this rank has the memory for the plan's rows, by allocating their largest buffers for a moment."""
        return can_allocate([int(size * self._scale) for size in self._demand.buffers(plan)], self.device)

    def run(self, plan: StepPlan) -> tuple[int, ...]:
        """Copy, zero, compute and sample. Rank 0: one token per row with a draw, in the plan's order; others: ()."""
        self._turn_over(plan)
        return self.compute(plan).tokens

    def logits(self, plan: StepPlan) -> Tensor | None:
        """`run` up to the logits: fp32 [rows with a draw, vocab] on rank 0; None elsewhere or when no row has one."""
        self._turn_over(plan)
        with torch.inference_mode():
            logits = self._forward(plan)[1]
            return None if logits is None else logits.clone()

    def states(self, plan: StepPlan) -> Tensor:
        """`run` up to the hidden states of every token of a plan with rows, whether its logits are wanted or not: [T,
        hidden], before the last norm. `project` makes logits of any of them."""
        self._turn_over(plan)
        with torch.inference_mode():
            return self._hidden(self._batcher.build(plan)).clone()

    def project(self, states: Tensor) -> Tensor | None:
        """Logits of hidden states [n, hidden]: fp32 [n, vocab] on rank 0, None elsewhere. All ranks call it together.
        They hold until the next call."""
        with torch.inference_mode():
            return self._comm.gather_logits(self._model.logits(states), self._model.widths)

    def _turn_over(self, plan: StepPlan) -> None:
        """What the plan does to whole blocks."""
        if self.pool is None:
            raise RuntimeError("allocate() comes before the first plan")
        with torch.inference_mode():
            self.pool.copy(plan.copy)
            self.pool.zero(plan.zero)

    def compute(self, plan: StepPlan) -> StepResult:
        """`run` without what it does to whole blocks, and with all that is asked for."""
        with torch.inference_mode():
            hidden, logits = self._forward(plan)
            tokens: tuple[int, ...] = ()
            logprobs: tuple[Logprobs | None, ...] = ()
            if logits is not None:
                draws = [row.draw for row in plan.rows if row.draw is not None]
                tokens = self._draw(logits, draws)
                logprobs = self._scorer.of_sampled(logits, draws, tokens)
            # Only now: its logits lie where those of the draws did.
            scores = () if hidden is None else self._scorer.of_prompts(plan, hidden)
        return StepResult(plan.step, tokens, logprobs=logprobs, scores=scores)

    def _draw(self, logits: Tensor, draws: list[Draw]) -> tuple[int, ...]:
        """A token for each row; the logits are as before then where their log-probabilities are wanted."""
        bent = bent_rows(draws)
        if not bent:
            return self._sample(logits, draws)
        told = any(draws[row].top is not None for row in bent)
        raw = logits[bent] if told else None
        bend(logits, draws)
        tokens = self._sample(logits, draws)
        if raw is not None:
            logits[bent] = raw
        return tokens

    def _forward(self, plan: StepPlan) -> tuple[Tensor | None, Tensor | None]:
        """Hidden states of all tokens, if there are any, and logits of the rows with a draw, on rank 0."""
        if not plan.rows:
            return None, None
        batch = self._batcher.build(plan)
        hidden = self._hidden(batch)
        if not batch.draws:
            return hidden, None
        sampled = hidden.index_select(0, batch.sampled) if len(batch.draws) < len(hidden) else hidden
        return hidden, self._comm.gather_logits(self._model.logits(sampled), self._model.widths)

    def _hidden(self, batch: Batch) -> Tensor:
        """[T, hidden], before the last norm; in a buffer that the next step uses again."""
        assert self._attention is not None
        return self._model.forward(batch, self._attention)

    def _demand_of(self, spec: Spec) -> Demand:
        rank, world, shard = self._comm.rank, self._comm.world, self._model.shard
        native = spec if isinstance(spec, ModelSpec) else None

        def share(columns: int) -> int:
            start, stop = split_evenly(columns, world)[rank]
            return stop - start

        return Demand(
            hidden=spec.hidden_size,
            q_heads=shard.q_heads,
            kv_heads=shard.kv_heads,
            head_dim=spec.head_dim,
            inner=share(spec.intermediate_size),
            vocabulary=spec.vocab_size if rank == 0 else self._model.widths[rank],
            item=self._kernels.dtype.itemsize,
            slot=max(layer.slot_bytes for layer in self.layout.layers),
            decodes=self.layout.precisions != {Precision.FP32},
            gather_slots=0 if self._kernels.in_place else BUCKET_SLOTS,
            tile=TILE,
            block=BLOCK,
            windows=tuple(group.window for group in self.layout.groups if group.half is None),
            channels=any(layer.by_channel for layer in self.layout.layers),
            latent=native.latent if native else None,
            expert=share(native.experts.columns) if native and native.experts else 0,
            slice=SLICE,
        )

    def _largest(self) -> StepPlan:
        """One-token rows that fill an attention gather, and one chunk with the rest of the token budget."""
        singles = max(0, min(self._max_rows, self._max_tokens) - 1)
        chunk = min(self._max_tokens - singles, self._reach)
        context = min(self._reach, max(1, BUCKET_SLOTS // max(1, singles)))
        draw = Draw(temperature=1.0, top_p=0.9)
        rows = [self._row(context - 1, 1, draw) for _ in range(singles)] + [self._row(0, chunk, draw)]
        return StepPlan(0, tuple(rows))

    def _row(self, start: int, count: int, draw: Draw) -> Row:
        """A row whose every block is block 0: its values do not matter."""
        tables = ((0,) * self.layout.blocks_for(start + count),) * len(self.layout.groups)
        return Row((0,) * count, start, tables, draw)
