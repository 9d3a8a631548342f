"""LlamaModel: one rank's share of the Llama shape (Llama, Mistral, Qwen2, Qwen3, SmolLM2).

Attention with grouped heads and rotary positions, a SiLU-gated MLP, RMSNorm before each; biases, QK-norm and tied
embeddings where the spec says so. Heads, MLP columns and vocabulary are split over the ranks, unevenly where they do
not divide; a bias after a reduction is added by rank 0 alone. Reductions are in fp32. It keeps no sequence state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from kvstore.layout import HeadShard, split_evenly
from workers.attention.backend import AttentionBackend
from workers.batch import Batch
from workers.layers import DTYPES, Linear, LinearKernel, RMSNorm, Rotation, pair_up, rotate
from workers.models.spec import ModelSpec
from workers.parallel import Communicator
from workers.weights import Checkpoint, to_dtype


@dataclass(frozen=True, slots=True)
class _Layer:
    """`qkv` gives query, key and value heads side by side, `gate_up` both halves of the MLP's input. `qk_norm` holds
    the norm of all query and key heads at once: weight [q_heads + kv_heads, head_dim]."""

    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class LlamaModel:
    """The weights of rank `comm.rank` out of `comm.world`, read from `checkpoint`.

    Raises WeightError for a tensor that is missing or does not fit, and ValueError when there are more ranks than query
    heads. `dtype` is the weights' own (fp32, bf16, fp16); activations have the kernel's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        *,
        comm: Communicator,
        kernel: LinearKernel,
        dtype: str,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._comm = comm
        self.shard: HeadShard = spec.shards(comm.world)[comm.rank]
        self.widths = tuple(stop - start for start, stop in split_evenly(spec.vocab_size, comm.world))
        loader = _Loader(spec, checkpoint, comm.rank, comm.world, kernel, DTYPES[dtype], device)
        self._vocabulary = loader.vocabulary
        self._dtype = kernel.dtype
        self._rotation = Rotation(spec.rope, spec.head_dim, device)
        self._embedding = loader.embedding()
        self._layers = [loader.layer(index, self.shard) for index in range(spec.layers)]
        self._norm = loader.norm("model.norm.weight")
        self._head = loader.head(self._embedding)

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden states [T, hidden] after the last layer, before the final norm."""
        turns = self._rotation.at(batch.positions)
        step = attention.prepare(batch)
        hidden = self._embed(batch.tokens)
        for index, layer in enumerate(self._layers):
            mixed = self._attend(layer, index, layer.attention_norm(hidden), turns, attention, step)
            hidden = hidden + self._reduce(layer.out(mixed))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
            hidden = hidden + self._reduce(layer.down(silu(gate).mul_(up)))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits fp32 [S, widths[rank]] of hidden states [S, hidden]."""
        return self._head(self._norm(hidden)).float()

    def _attend(
        self, layer: _Layer, index: int, x: Tensor, turns: Tensor, attention: AttentionBackend, step: object
    ) -> Tensor:
        shard, dim = self.shard, self._spec.head_dim
        heads = layer.qkv(x).unflatten(-1, (-1, dim))
        turning = heads[:, : shard.q_heads + shard.kv_heads]
        if layer.qk_norm is not None:
            turning.copy_(layer.qk_norm(turning))
        rotate(turning, turns)
        return attention.attend(index, heads[:, : shard.q_heads], heads[:, shard.q_heads :], step)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._comm.world == 1:
            return embedding(tokens, self._embedding).to(self._dtype)
        start, stop = self._vocabulary
        mine = (tokens >= start) & (tokens < stop)
        rows = embedding(torch.where(mine, tokens - start, 0), self._embedding).float()
        return self._comm.all_reduce(rows.masked_fill_(~mine[:, None], 0.0)).to(self._dtype)

    def _reduce(self, partial: Tensor) -> Tensor:
        if self._comm.world == 1:
            return partial
        return self._comm.all_reduce(partial.float()).to(partial.dtype)


class _Loader:
    """Builds the parts of one rank from its slices of the checkpoint."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        rank: int,
        world: int,
        kernel: LinearKernel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._rank = rank
        self._kernel = kernel
        self._dtype = dtype
        self._device = device
        self._columns = split_evenly(spec.intermediate_size, world)[rank]
        self.vocabulary = split_evenly(spec.vocab_size, world)[rank]

    def embedding(self) -> Tensor:
        """This rank's rows of the token embedding, in the weights' dtype."""
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return self._take("model.embed_tokens.weight", shape, rows=self.vocabulary)

    def head(self, tied: Tensor) -> Linear:
        """The projection to this rank's slice of the vocabulary."""
        if self._spec.tie_embeddings:
            self._checkpoint.skip("lm_head.weight")
            return self._kernel.build(tied, None)
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return self._kernel.build(self._take("lm_head.weight", shape, rows=self.vocabulary), None)

    def norm(self, name: str) -> RMSNorm:
        weight = self._take(name, (self._spec.hidden_size,))
        return RMSNorm(weight, self._spec.norm_eps, self._kernel.dtype)

    def layer(self, index: int, shard: HeadShard) -> _Layer:
        """Layer `index` with the heads of `shard`."""
        prefix = f"model.layers.{index}."
        return _Layer(
            attention_norm=self.norm(prefix + "input_layernorm.weight"),
            qkv=self._qkv(prefix + "self_attn.", shard),
            qk_norm=self._qk_norm(prefix + "self_attn.", shard),
            out=self._out(prefix + "self_attn.o_proj", shard),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            gate_up=self._gate_up(prefix + "mlp."),
            down=self._down(prefix + "mlp.down_proj"),
        )

    def _qkv(self, prefix: str, shard: HeadShard) -> Linear:
        spec, dim = self._spec, self._spec.head_dim
        parts = (
            ("q_proj", spec.q_heads, shard.q_start, shard.q_stop, True),
            ("k_proj", spec.kv_heads, shard.kv_start, shard.kv_stop, True),
            ("v_proj", spec.kv_heads, shard.kv_start, shard.kv_stop, False),
        )
        weights, biases = [], []
        for name, total, start, stop, rotates in parts:
            rows = (start * dim, stop * dim)
            weight = self._take(prefix + name + ".weight", (total * dim, spec.hidden_size), rows=rows)
            weights.append(pair_up(weight, dim) if rotates else weight)
            if spec.qkv_bias:
                bias = self._take(prefix + name + ".bias", (total * dim,), rows=rows)
                biases.append(pair_up(bias, dim) if rotates else bias)
        return self._kernel.build(torch.cat(weights), torch.cat(biases) if biases else None)

    def _qk_norm(self, prefix: str, shard: HeadShard) -> RMSNorm | None:
        if not self._spec.qk_norm:
            return None
        dim = self._spec.head_dim
        query, key = (pair_up(self._take(f"{prefix}{name}_norm.weight", (dim,)), dim) for name in "qk")
        weight = torch.cat((query.expand(shard.q_heads, -1), key.expand(shard.kv_heads, -1)))
        return RMSNorm(weight, self._spec.norm_eps, self._kernel.dtype)

    def _out(self, name: str, shard: HeadShard) -> Linear:
        spec, dim = self._spec, self._spec.head_dim
        columns = (shard.q_start * dim, shard.q_stop * dim)
        weight = self._take(name + ".weight", (spec.hidden_size, spec.q_heads * dim), columns=columns)
        return self._kernel.build(weight, self._reduced_bias(name, spec.output_bias))

    def _gate_up(self, prefix: str) -> Linear:
        spec = self._spec
        weights, biases = [], []
        for name in ("gate_proj", "up_proj"):
            shape = (spec.intermediate_size, spec.hidden_size)
            weights.append(self._take(f"{prefix}{name}.weight", shape, rows=self._columns))
            if spec.mlp_bias:
                biases.append(self._take(f"{prefix}{name}.bias", shape[:1], rows=self._columns))
        return self._kernel.build(torch.cat(weights), torch.cat(biases) if biases else None)

    def _down(self, name: str) -> Linear:
        spec = self._spec
        weight = self._take(name + ".weight", (spec.hidden_size, spec.intermediate_size), columns=self._columns)
        return self._kernel.build(weight, self._reduced_bias(name, spec.mlp_bias))

    def _reduced_bias(self, name: str, present: bool) -> Tensor | None:
        """The bias of a linear whose outputs are summed over ranks: read by all, added by rank 0."""
        if not present:
            return None
        bias = self._take(name + ".bias", (self._spec.hidden_size,))
        return bias if self._rank == 0 else None

    def _take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        return to_dtype(self._checkpoint.take(name, shape, rows, columns), self._dtype).to(self._device)
