"""Runner: one rank's model and KV pool; a plan in, sampled tokens out. It keeps no sequence state."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kvstore.layout import KVLayout, Precision
from workers.attention.reference import BUCKET_SLOTS, ReferenceAttention
from workers.batch import build_batch
from workers.footprint import peak_bytes
from workers.kvpool import KVPool
from workers.layers import choose_kernel
from workers.models.llama import LlamaModel
from workers.models.spec import ModelSpec
from workers.parallel import Communicator
from workers.plan import Draw, Row, StepPlan
from workers.sampler import sample
from workers.weights import Checkpoint


class Runner:
    """Rank `comm.rank` of the model in `folder`, loaded on construction.

    `precision` is the KV cache's; `dtype` the weights' ("fp32", "bf16", "fp16"; their values are rounded to it);
    `linear_kernel` forces a kernel by name. Raises Unsupported, WeightError, or ValueError for more ranks than query
    heads. `allocate` must come before the first `run`. Every rank of a group runs the same plans in the same order.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        *,
        comm: Communicator,
        block_size: int,
        precision: Precision,
        dtype: str,
        device: torch.device | str = "cpu",
        max_num_seqs: int,
        max_num_batched_tokens: int,
        linear_kernel: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.layout: KVLayout = spec.layout(block_size, precision, comm.world)[comm.rank]
        self._comm = comm
        self._max_rows = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._reach = spec.context_length
        kernel = choose_kernel(dtype, self.device, linear_kernel)
        self.linear_kernel = kernel.name
        self._attention: ReferenceAttention | None = None
        self.pool: KVPool | None = None
        with torch.inference_mode(), Checkpoint(folder) as checkpoint:
            self._model = LlamaModel(spec, checkpoint, comm=comm, kernel=kernel, dtype=dtype, device=self.device)
            checkpoint.finish()

    def allocate(self, blocks: int) -> None:
        """Make the KV pool of `blocks` blocks, all zeros; an earlier pool is let go first."""
        if blocks < 1:
            raise ValueError(f"a KV pool needs at least 1 block, got {blocks}")
        self.pool = self._attention = None
        self.pool = KVPool(self.layout, blocks, self.device)
        self._attention = ReferenceAttention(self.pool)

    def profile(self) -> int:
        """Bytes that the largest step takes beyond weights and pool. All ranks call it together, before `allocate`."""
        self.allocate(1)
        try:
            return peak_bytes(lambda: self.run(self._largest()), self.device)
        finally:
            self.pool = self._attention = None

    def run(self, plan: StepPlan) -> tuple[int, ...]:
        """Copy, zero, compute and sample. Rank 0: one token per row with a draw, in the plan's order; others: ()."""
        logits = self.logits(plan)
        if logits is None:
            return ()
        with torch.inference_mode():
            return sample(logits, [row.draw for row in plan.rows if row.draw is not None])

    def logits(self, plan: StepPlan) -> Tensor | None:
        """`run` up to the logits: fp32 [rows with a draw, vocab] on rank 0; None elsewhere or when no row has one."""
        if self.pool is None or self._attention is None:
            raise RuntimeError("allocate() comes before the first plan")
        with torch.inference_mode():
            self.pool.copy(plan.copy)
            self.pool.zero(plan.zero)
            if not plan.rows:
                return None
            batch = build_batch(plan, self.layout.block_size, self.device)
            hidden = self._model.forward(batch, self._attention)
            if not batch.draws:
                return None
            if len(batch.draws) < len(hidden):
                hidden = hidden.index_select(0, batch.sampled)
            return self._comm.gather_logits(self._model.logits(hidden), self._model.widths)

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
        return Row((0,) * count, start, ((0,) * self.layout.blocks_for(start + count),), draw)
