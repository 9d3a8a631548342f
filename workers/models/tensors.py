"""Tensors: the slices of a checkpoint that are one rank's, under the names that a family gives them.

It knows how families fuse and turn their projections, and the order in which rotation wants heads; not what becomes of
a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.shards import HeadShard
from workers.models.parts import NormKind
from workers.models.rope import Rope
from workers.models.spec import ModelSpec
from workers.rotation import pair_up
from workers.weights import DTYPES, Checkpoint, to_dtype

Slice = tuple[int, int] | None
"""[start, stop); None: all."""


class Tensors:
    """What `checkpoint` holds of `spec`, in `dtype` on `device`. Every method raises WeightError for a tensor that is
    missing or does not fit."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, dtype: str, device: torch.device) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._dtype = DTYPES[dtype]
        self._device = device
        names = spec.names
        bare = f"{names.embedding}.weight"
        self._root = "" if names.root + bare not in checkpoint and bare in checkpoint else names.root

        for index in range(spec.layers, spec.layers + spec.unused_layers):
            checkpoint.skip_under(f"{self._root}{names.layer}.{index}.")

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this full name."""
        return name in self._checkpoint

    def layer(self, index: int) -> str:
        """What names inside layer `index` begin with."""
        names = self._spec.names
        prefix = f"{self._root}{names.layer}.{index}."
        for name in names.ignored:
            self._checkpoint.skip(prefix + name)
        return prefix

    def outer(self, name: str) -> str:
        """The full name of something outside of layers."""
        return self._root + name

    def head(self) -> str:
        """The name of the logits' projection; with tied embeddings a copy of it is left unread."""
        names = self._spec.names.heads
        if self._spec.tie_embeddings:
            for name in names:
                self._checkpoint.skip(f"{name}.weight")
        return next((name for name in names if f"{name}.weight" in self._checkpoint), names[-1])

    def weight(self, name: str, shape: tuple[int, int], rows: Slice = None, columns: Slice = None) -> Tensor:
        """Rows or columns of a linear's weight [out, in], straight from the file where nothing is to be done before:
        for kernels to pack or convert, not to keep."""
        if not self._spec.names.transposed:
            return self._cast(self._checkpoint.take(f"{name}.weight", shape, rows, columns))
        return self._cast(self._checkpoint.take(f"{name}.weight", shape[::-1], columns, rows).t())

    def matrix(
        self, name: str, shape: tuple[int, int, int], index: int, rows: Slice = None, columns: Slice = None
    ) -> Tensor:
        """The same of matrix `index` of those that lie behind each other in the tensor `name`."""
        found = self._checkpoint.take(name, shape)[index]
        return self._cast(found[slice(*rows or (None,)), slice(*columns or (None,))])

    def bias(self, name: str, size: int, rows: Slice = None) -> Tensor:
        """A linear's bias, or part of it."""
        return self.vector(f"{name}.bias", (size,), rows)

    def vector(self, name: str, shape: tuple[int, ...], rows: Slice = None) -> Tensor:
        """What is kept as it is, in memory of its own."""
        return to_dtype(self._checkpoint.take(name, shape, rows), self._dtype).to(self._device)

    def norm(self, name: str, size: int) -> Tensor:
        """What a norm multiplies by, fp32 [size]."""
        weight = self.vector(f"{name}.weight", (size,)).float()
        return weight + 1.0 if self._spec.norm is NormKind.RMS_OFFSET else weight

    def heads(self, prefix: str, shard: HeadShard, rope: Rope | None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the queries, keys and values of `shard`, one behind the other; the rows of queries and
        keys in the order that workers.rotation turns them in."""
        weights = torch.cat(self._paired(self._head_parts(prefix, shard, bias=False), rope))
        if not self._spec.qkv_bias:
            return weights, None
        return weights, torch.cat(self._paired(self._head_parts(prefix, shard, bias=True), rope))

    def head_norms(self, prefix: str, shard: HeadShard, rope: Rope | None) -> Tensor:
        """What the norms of `shard`'s query and key heads multiply by, fp32 [heads, head_dim]."""
        names, dim = self._spec.names.qk_norm, self._spec.head_dim
        query, key = (self._pair(self.norm(prefix + name, dim), rope) for name in names)
        return torch.cat((query.expand(shard.q_heads, -1), key.expand(shard.kv_heads, -1)))

    def _head_parts(self, prefix: str, shard: HeadShard, *, bias: bool) -> list[Tensor]:
        """Queries, keys and values of `shard`."""
        spec, dim = self._spec, self._spec.head_dim
        totals = [spec.q_heads, spec.kv_heads, spec.kv_heads]
        ranges = [(shard.q_start, shard.q_stop), (shard.kv_start, shard.kv_stop), (shard.kv_start, shard.kv_stop)]
        names = [prefix + name for name in spec.names.qkv]
        if len(names) == 1 and spec.names.grouped:
            return self._from_groups(names[0], shard, bias=bias)
        starts = [0, 0, 0] if len(names) == 3 else [0, totals[0], totals[0] + totals[1]]
        sizes = totals if len(names) == 3 else [sum(totals)] * 3
        return [
            self._rows(name, size * dim, ((first + start) * dim, (first + stop) * dim), bias=bias)
            for name, size, first, (start, stop) in zip(names * (3 // len(names)), sizes, starts, ranges, strict=True)
        ]

    def _from_groups(self, name: str, shard: HeadShard, *, bias: bool) -> list[Tensor]:
        """The same, of a tensor in which each KV head follows the query heads that read it."""
        spec, dim = self._spec, self._spec.head_dim
        ratio = spec.q_heads // spec.kv_heads
        width = (ratio + 2) * dim
        rows = (shard.kv_start * width, shard.kv_stop * width)
        groups = self._rows(name, spec.kv_heads * width, rows, bias=bias).unflatten(0, (-1, ratio + 2, dim))
        first = shard.q_start - shard.kv_start * ratio
        queries = groups[:, :ratio].flatten(0, 1)[first : first + shard.q_heads]
        return [queries.flatten(0, 1), groups[:, ratio].flatten(0, 1), groups[:, ratio + 1].flatten(0, 1)]

    def _rows(self, name: str, total: int, rows: tuple[int, int], *, bias: bool) -> Tensor:
        return self.bias(name, total, rows) if bias else self.weight(name, (total, self._spec.hidden_size), rows)

    def _paired(self, parts: list[Tensor], rope: Rope | None) -> list[Tensor]:
        query, key, value = parts
        return [self._pair(query, rope), self._pair(key, rope), value]

    def _pair(self, rows: Tensor, rope: Rope | None) -> Tensor:
        dim = self._spec.head_dim
        return rows if rope is None else pair_up(rows, dim, rope.rotated(dim))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype).to(self._device)
