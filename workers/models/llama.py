"""LlamaModel: one rank's share of the Llama shape (Llama, Mistral, Qwen2, Qwen3, SmolLM2).

Attention with grouped heads and rotary positions, a SiLU-gated MLP, RMSNorm before each; biases, QK-norm and tied
embeddings where the spec says so. Heads, MLP columns and vocabulary are split over the ranks, unevenly where they do
not divide; a bias after a reduction is added by rank 0 alone. Reductions are in fp32. It keeps no sequence state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kvstore.layout import HeadShard, split_evenly
from workers.attention.backend import AttentionBackend, AttentionRule
from workers.batch import Batch
from workers.kernels import Activation, Adding, HeadNorm, Kernels, Linear, Norm
from workers.models.spec import ModelSpec
from workers.parallel import Communicator
from workers.rotation import Rotation, pair_up
from workers.weights import DTYPES, Checkpoint, to_dtype


@dataclass(frozen=True, slots=True)
class _Layer:
    """`qkv` gives query, key and value heads side by side; `qk_norm` is that of all query and key heads at once."""

    attention_norm: Norm
    qkv: Linear
    qk_norm: HeadNorm | None
    out: Adding
    mlp_norm: Norm
    gate_up: Linear
    down: Adding


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
        kernels: Kernels,
        dtype: str,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._comm = comm
        self.shard: HeadShard = spec.shards(comm.world)[comm.rank]
        self.widths = tuple(stop - start for start, stop in split_evenly(spec.vocab_size, comm.world))
        loader = _Loader(spec, checkpoint, comm, kernels, DTYPES[dtype], device)
        self._vocabulary = loader.vocabulary
        self._replay = kernels.replay
        self._streams = _Room((spec.hidden_size,), kernels.stream, device)
        self._turns = _Room((1, spec.head_dim // 2), torch.complex64, device)
        self._rotation = Rotation(spec.rope, spec.head_dim, device)
        self._embedding = loader.embedding()
        self._layers = [loader.layer(index, self.shard) for index in range(spec.layers)]
        self._norm = loader.norm("model.norm.weight")
        self._head = loader.head(self._embedding)
        self.rules = (AttentionRule(spec.head_dim**-0.5),) * spec.layers

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden states [T, hidden] after the last layer, before the final norm."""
        turns = self._turns.of(len(batch.positions)).copy_(self._rotation.at(batch.positions))
        step = attention.prepare(batch)
        hidden = self._embed(batch.tokens)
        if self._comm.world > 1:  # what ranks exchange is no kernel's
            return self._through(hidden, turns, attention, step)
        return self._replay(attention, (hidden, turns), lambda: self._through(hidden, turns, attention, step))

    def _through(self, hidden: Tensor, turns: Tensor, attention: AttentionBackend, step: object) -> Tensor:
        """All layers."""
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(layer.attention_norm(hidden))
            if layer.qk_norm is not None:
                layer.qk_norm(heads)
            hidden = layer.out(attention.attend(index, heads, turns, step), hidden)
            hidden = layer.down(layer.gate_up(layer.mlp_norm(hidden)), hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits fp32 [S, widths[rank]] of hidden states [S, hidden]."""
        return self._head(self._norm(hidden))

    def _embed(self, tokens: Tensor) -> Tensor:
        stream = self._streams.of(len(tokens))
        if self._comm.world == 1:
            return stream.copy_(embedding(tokens, self._embedding))
        start, stop = self._vocabulary
        mine = (tokens >= start) & (tokens < stop)
        rows = embedding(torch.where(mine, tokens - start, 0), self._embedding).float()
        return stream.copy_(self._comm.all_reduce(rows.masked_fill_(~mine[:, None], 0.0)))


class _Room:
    """Memory for a value per token. It is the same tensor in every step of one size: kernels keep calls prepared."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._room = torch.empty(0, *shape, dtype=dtype, device=device)
        self._views: dict[int, Tensor] = {}

    def of(self, rows: int) -> Tensor:
        """[rows, …], holding anything."""
        if rows > len(self._room):
            self._room = self._room.new_empty(rows, *self._room.shape[1:])
            self._views.clear()
        view = self._views.get(rows)
        if view is None:
            view = self._views[rows] = self._room[:rows]
        return view


class _Loader:
    """Builds the parts of one rank from its slices of the checkpoint."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        comm: Communicator,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._comm = comm
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._columns = split_evenly(spec.intermediate_size, comm.world)[comm.rank]
        self.vocabulary = split_evenly(spec.vocab_size, comm.world)[comm.rank]

    def embedding(self) -> Tensor:
        """This rank's rows of the token embedding, in the weights' dtype."""
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return self._take("model.embed_tokens.weight", shape, rows=self.vocabulary)

    def head(self, tied: Tensor) -> Linear:
        """The projection to this rank's slice of the vocabulary."""
        if self._spec.tie_embeddings:
            self._checkpoint.skip("lm_head.weight")
            return self._kernels.linear(tied, None, slot="logits", wide=True)
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        weight = self._weight("lm_head.weight", shape, rows=self.vocabulary)
        return self._kernels.linear(weight, None, slot="logits", wide=True)

    def norm(self, name: str) -> Norm:
        """A norm of the residual stream."""
        weight = self._take(name, (self._spec.hidden_size,))
        return self._kernels.norm(weight, self._spec.norm_eps, slot="normed")

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
            weight = self._weight(prefix + name + ".weight", (total * dim, spec.hidden_size), rows=rows)
            weights.append(pair_up(weight, dim) if rotates else weight)
            if spec.qkv_bias:
                bias = self._take(prefix + name + ".bias", (total * dim,), rows=rows)
                biases.append(pair_up(bias, dim) if rotates else bias)
        return self._kernels.linear(torch.cat(weights), torch.cat(biases) if biases else None, slot="heads")

    def _qk_norm(self, prefix: str, shard: HeadShard) -> HeadNorm | None:
        if not self._spec.qk_norm:
            return None
        dim = self._spec.head_dim
        query, key = (pair_up(self._take(f"{prefix}{name}_norm.weight", (dim,)), dim) for name in "qk")
        weight = torch.cat((query.expand(shard.q_heads, -1), key.expand(shard.kv_heads, -1)))
        return self._kernels.head_norm(weight, self._spec.norm_eps)

    def _out(self, name: str, shard: HeadShard) -> Adding:
        spec, dim = self._spec, self._spec.head_dim
        columns = (shard.q_start * dim, shard.q_stop * dim)
        weight = self._weight(name + ".weight", (spec.hidden_size, spec.q_heads * dim), columns=columns)
        return self._adding(weight, self._reduced_bias(name, spec.output_bias))

    def _gate_up(self, prefix: str) -> Linear:
        gate, gate_bias = self._columns_of(prefix + "gate_proj")
        up, up_bias = self._columns_of(prefix + "up_proj")
        biases = None if gate_bias is None or up_bias is None else (gate_bias, up_bias)
        return self._kernels.gated(gate, up, biases, Activation.SILU, slot="inner")

    def _columns_of(self, name: str) -> tuple[Tensor, Tensor | None]:
        """This rank's part of a linear into the MLP's inside: weight and bias."""
        shape = (self._spec.intermediate_size, self._spec.hidden_size)
        weight = self._weight(f"{name}.weight", shape, rows=self._columns)
        return weight, self._take(f"{name}.bias", shape[:1], rows=self._columns) if self._spec.mlp_bias else None

    def _down(self, name: str) -> Adding:
        spec = self._spec
        weight = self._weight(name + ".weight", (spec.hidden_size, spec.intermediate_size), columns=self._columns)
        return self._adding(weight, self._reduced_bias(name, spec.mlp_bias))

    def _adding(self, weight: Tensor, bias: Tensor | None) -> Adding:
        """A linear that adds to the residual stream what all ranks together have computed, summed in fp32."""
        if self._comm.world == 1:
            return self._kernels.adding(weight, bias)
        product, onto = self._kernels.linear(weight, bias, slot="partial", wide=True), self._comm.all_reduce_onto
        return lambda x, stream: onto(product(x), stream)

    def _reduced_bias(self, name: str, present: bool) -> Tensor | None:
        """The bias of a linear whose outputs are summed over ranks: read by all, added by rank 0."""
        if not present:
            return None
        bias = self._take(name + ".bias", (self._spec.hidden_size,))
        return bias if self._comm.rank == 0 else None

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """What kernels pack or convert, straight from the file where nothing is to be done before."""
        return self._checkpoint.take(name, shape, rows, columns).to(self._dtype).to(self._device)

    def _take(self, name: str, shape: tuple[int, ...], rows: tuple[int, int] | None = None) -> Tensor:
        """What is kept as it is."""
        return to_dtype(self._checkpoint.take(name, shape, rows), self._dtype).to(self._device)
