"""MLA's projections: from the normed stream to queries and latents, and from latents to keys and values (DeepSeek-V2,
arXiv 2405.04434 section 2.1). What is attended to, and when latents are expanded, is the attention backend's affair.

Every rank computes the whole latent, which all heads share, and the queries of its own heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.shards import HeadShard
from workers.attention.backend import Expansion
from workers.kernels import HeadNorm, Kernels, Linear
from workers.models.shapes import LatentShape
from workers.models.tensors import Tensors
from workers.rotation import pair_up


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """A Linear. `query_latent` makes what `query_norm` then normalises in place and `query` takes (None: `query` takes
    the stream); `latent` makes latents and keys to be rotated, the former normalised by `latent_norm` in place."""

    query_latent: Linear | None
    query_norm: HeadNorm | None
    query: Linear
    latent: Linear
    latent_norm: HeadNorm

    def __call__(self, normed: Tensor) -> Tensor:
        """[T, hidden] → queries, latents and keys to be rotated side by side, as AttentionBackend.attend takes them."""
        source = normed
        if self.query_latent is not None and self.query_norm is not None:
            source = self.query_latent(normed)
            self.query_norm(source)
        latents = self.latent(normed)
        self.latent_norm(latents)
        return torch.cat((self.query(source), latents), -1)


@dataclass(frozen=True, slots=True)
class LatentLoader:
    """Reads what belongs to the query heads of `shard`, out of all `heads`; `hidden` is the stream's width."""

    shape: LatentShape
    heads: int
    hidden: int
    shard: HeadShard
    tensors: Tensors
    kernels: Kernels

    def projections(self, prefix: str) -> LatentHeads:
        """Those of the layer whose tensors' names begin with `prefix`."""
        shape, prefix = self.shape, prefix + "self_attn."
        query_latent = query_norm = None
        query_name, inputs = "q_proj", self.hidden
        if shape.q_rank is not None:
            query_latent = self._down(prefix + "q_a_proj", shape.q_rank, rotated=0, slot="query_latent")
            query_norm = self._norm(prefix + "q_a_layernorm", shape.q_rank)
            query_name, inputs = "q_b_proj", shape.q_rank
        rows = (self.shard.q_start * shape.query, self.shard.q_stop * shape.query)
        weight = self.tensors.weight(prefix + query_name, (self.heads * shape.query, inputs), rows)
        return LatentHeads(
            query_latent,
            query_norm,
            self.kernels.linear(self._paired(weight, shape.query), None, slot="query"),
            self._down(prefix + "kv_a_proj_with_mqa", shape.rank + shape.rope, rotated=shape.rope, slot="latent"),
            self._norm(prefix + "kv_a_layernorm", shape.rank),
        )

    def expansion(self, prefix: str) -> Expansion:
        """The matrices that make keys and values of latents: the checkpoint has each head's behind each other."""
        shape = self.shape
        width = shape.nope + shape.values
        rows = (self.shard.q_start * width, self.shard.q_stop * width)
        both = self.tensors.weight(prefix + "self_attn.kv_b_proj", (self.heads * width, shape.rank), rows)
        parts = both.unflatten(0, (-1, width)).split((shape.nope, shape.values), 1)
        dtype = self.kernels.dtype
        keys, values = (part.to(dtype, copy=True, memory_format=torch.contiguous_format) for part in parts)
        return Expansion(shape, keys, values)

    def _down(self, name: str, outputs: int, *, rotated: int, slot: str) -> Linear:
        """A linear into a latent, whose last `rotated` outputs are for a key that turns."""
        weight = self.tensors.weight(name, (outputs, self.hidden))
        bias = self.tensors.bias(name, outputs) if self.shape.biased else None
        if rotated:
            weight, bias = self._paired(weight, outputs), None if bias is None else self._paired(bias, outputs)
        return self.kernels.linear(weight, bias, slot=slot)

    def _norm(self, name: str, size: int) -> HeadNorm:
        return self.kernels.head_norm(self.tensors.norm(name, size)[None], self.shape.norm_eps)

    def _paired(self, rows: Tensor, width: int) -> Tensor:
        """Rows [n * width, …], the last of each `width` in the order that workers.rotation turns them in."""
        if self.shape.interleaved:
            return rows
        still, turned = rows.unflatten(0, (-1, width)).split((width - self.shape.rope, self.shape.rope), 1)
        turned = pair_up(turned.flatten(0, 1), self.shape.rope).unflatten(0, (-1, self.shape.rope))
        return torch.cat((still, turned), 1).flatten(0, 1)
