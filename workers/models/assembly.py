"""Assembly: a rank's parts of a decoder, made of a spec, a checkpoint and kernels. Called while a model loads.

To give layers another MLP or another attention, make the part in a file of its own and choose it in `_mlp` or
`_attention`: an MLP part is called with the normed stream [T, hidden] and the stream, an attention part with the step
beside them; both give the stream with what they have to add. `adding` makes what adds a product to the stream over all
ranks.

Where a model multiplies what its layers add by a factor s, the stream is kept divided by s instead, and no weight
changes: embeddings are divided by it, and RMSNorm, which does not see the scale of what it is given, has epsilons
divided by s².
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.shards import split_evenly
from workers.attention.backend import AttentionRule
from workers.kernels import Activation, Adding, Kernels, Linear, Norm
from workers.models.embedding import Embedding
from workers.models.experts import ExpertLoader
from workers.models.latent import LatentLoader
from workers.models.layer import AttentionPart, DenseMlp, HeadAttention, Layer, MlpPart, Parallel, Sequential, Shared
from workers.models.parts import NormKind, Residual
from workers.models.rope import Rope
from workers.models.shapes import LatentShape
from workers.models.spec import ModelSpec
from workers.models.tensors import Tensors
from workers.parallel import Communicator
from workers.weights import Checkpoint


class Assembly:
    """The parts of rank `comm.rank`. Methods raise WeightError for a tensor that is missing or does not fit."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        comm: Communicator,
        kernels: Kernels,
        dtype: str,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.comm = comm
        self.kernels = kernels
        self.tensors = Tensors(spec, checkpoint, dtype, device)
        self.shard = spec.shards(comm.world)[comm.rank]
        self.columns = split_evenly(spec.intermediate_size, comm.world)[comm.rank]
        vocabulary = split_evenly(spec.vocab_size, comm.world)[comm.rank]
        self._vocabulary = vocabulary
        name = self.tensors.outer(f"{spec.names.embedding}.weight")
        self._table = self.tensors.vector(name, (spec.vocab_size, spec.hidden_size), vocabulary)

    def embedding(self) -> Embedding:
        """Tokens to the stream."""
        spec, positions = self.spec, None
        if spec.learned_positions:
            name = self.tensors.outer(f"{spec.names.positions}.weight")
            positions = self.tensors.vector(name, (spec.learned_positions, spec.hidden_size))
        return Embedding(
            self._table,
            self._vocabulary,
            self.comm,
            scale=spec.embedding_scale,
            divisor=spec.branch_scale,
            positions=positions,
        )

    def layer(self, index: int) -> Layer:
        """Layer `index`."""
        names, prefix = self.spec.names, self.tensors.layer(index)
        attention, mlp = self._attention(index, prefix), self._mlp(index, prefix)
        norm = self.norm(prefix + names.attention_norm)
        if self.spec.residual is Residual.SHARED:
            return Shared(norm, attention, mlp)
        if self.spec.residual is Residual.PARALLEL:
            return Parallel(norm, attention, self.norm(prefix + names.mlp_norm, slot="mlp_normed"), mlp)
        return Sequential(norm, attention, self.norm(prefix + names.mlp_norm), mlp)

    def final_norm(self) -> Norm:
        """The norm before the logits."""
        return self.norm(self.tensors.outer(self.spec.names.final_norm), scale=self.spec.final_scale)

    def rule(self, index: int) -> AttentionRule:
        """What an attention backend has to do in layer `index`."""
        spec, expansion = self.spec, None
        if spec.latent:
            expansion = self._latents(spec.latent).expansion(self.tensors.layer(index))
        return AttentionRule(spec.scale, spec.softcap, spec.windows[index], expansion=expansion)

    def head(self) -> Linear:
        """The projection to this rank's slice of the vocabulary."""
        spec, name = self.spec, self.tensors.head()
        weight = self._table
        if not spec.tie_embeddings:
            weight = self.tensors.weight(name, (spec.vocab_size, spec.hidden_size), self._vocabulary)
        product = self.kernels.linear(weight, None, slot="logits", wide=True)
        if (cap := spec.logit_softcap) is None:
            return product
        return lambda x: product(x).div_(cap).tanh_().mul_(cap)

    def norm(self, name: str, *, slot: str = "normed", scale: float = 1.0) -> Norm:
        """A norm of the residual stream, whose outcome is multiplied by `scale`."""
        size, eps = self.spec.hidden_size, self.spec.norm_eps / self.spec.branch_scale**2
        weight = self.tensors.norm(name, size) * scale
        if self.spec.norm is NormKind.LAYER:
            return self.kernels.layer_norm(weight, self.tensors.bias(name, size), eps, slot=slot)
        return self.kernels.norm(weight, eps, slot=slot)

    def adding(self, name: str, inputs: int, columns: tuple[int, int], *, bias: bool, post_norm: str = "") -> Adding:
        """What adds to the stream the product of the linear `name` over all ranks, summed in fp32; this rank has
        `columns` of its `inputs`. `post_norm`, if given, is of the sum."""
        hidden = self.spec.hidden_size
        weight = self.tensors.weight(name, (hidden, inputs), columns=columns)
        shift = self.tensors.bias(name, hidden) if bias else None
        if self.comm.rank:
            shift = None  # rank 0 adds it for all
        norm = self.kernels.adding_norm(self.tensors.norm(post_norm, hidden), self.spec.norm_eps) if post_norm else None
        return self.reduced(weight, shift, norm)

    def reduced(self, weight: Tensor, bias: Tensor | None, norm: Adding | None = None) -> Adding:
        """The same of a weight [hidden, in] in hand. `norm` adds what it makes of an fp32 sum."""
        if norm is None and self.comm.world == 1:
            return self.kernels.adding(weight, bias)
        product = self.kernels.linear(weight, bias, slot="partial", wide=True)
        if norm is None:
            onto = self.comm.all_reduce_onto
            return lambda x, stream: onto(product(x), stream)
        total = self.comm.all_reduce
        return lambda x, stream: norm(total(product(x)), stream)

    def _attention(self, index: int, prefix: str) -> AttentionPart:
        spec, names, dim = self.spec, self.spec.names, self.spec.value_dim
        number = spec.rope_of(index)
        heads = self._heads(prefix, spec.ropes[number] if spec.ropes else None)
        columns = (self.shard.q_start * dim, self.shard.q_stop * dim)
        post_norm = prefix + names.attention_post_norm if spec.residual is Residual.SANDWICH else ""
        out = self.adding(prefix + names.out, spec.q_heads * dim, columns, bias=spec.output_bias, post_norm=post_norm)
        return HeadAttention(index, number, heads, out)

    def _heads(self, prefix: str, rope: Rope | None) -> Linear:
        """What AttentionBackend.attend takes, made of the normed stream."""
        if self.spec.latent:
            return self._latents(self.spec.latent).projections(prefix)
        heads = self.kernels.linear(*self.tensors.heads(prefix, self.shard, rope), slot="heads")
        if self.spec.qk_norm:
            heads = self._normed(heads, self.tensors.head_norms(prefix, self.shard, rope))
        return heads

    def _latents(self, shape: LatentShape) -> LatentLoader:
        spec = self.spec
        return LatentLoader(shape, spec.q_heads, spec.hidden_size, self.shard, self.tensors, self.kernels)

    def _normed(self, heads: Linear, weight: Tensor) -> Linear:
        """Query and key heads normalised as they come."""
        norm = self.kernels.head_norm(weight, self.spec.norm_eps)

        def apply(x: Tensor) -> Tensor:
            found = heads(x)
            norm(found)
            return found

        return apply

    def _mlp(self, index: int, prefix: str) -> MlpPart:
        """The MLP of layer `index`, or its experts."""
        spec, names = self.spec, self.spec.names
        if spec.experts is not None and spec.is_sparse(index):
            activation = Activation(spec.activation)
            loader = ExpertLoader(spec.experts, spec.hidden_size, activation, self.tensors, self.kernels, self.comm)
            return loader.mixture(prefix)
        post_norm = prefix + names.mlp_post_norm if spec.residual is Residual.SANDWICH else ""
        down = self.adding(
            prefix + names.down, spec.intermediate_size, self.columns, bias=spec.mlp_bias, post_norm=post_norm
        )
        return DenseMlp(self._inner([prefix + name for name in names.gate_up]), down)

    def _inner(self, names: list[str]) -> Linear:
        """From the stream's width to this rank's columns of the MLP."""
        kernels, activation = self.kernels, Activation(self.spec.activation)
        if not self.spec.gated:
            return kernels.activated(*self._columns(names[0]), activation, slot="inner")
        if len(names) == 1:
            (gate, gate_bias), (up, up_bias) = self._columns(names[0], 0, 2), self._columns(names[0], 1, 2)
        else:
            (gate, gate_bias), (up, up_bias) = map(self._columns, names)
        biases = None if gate_bias is None or up_bias is None else (gate_bias, up_bias)
        return kernels.gated(gate, up, biases, activation, slot="inner")

    def _columns(self, name: str, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor | None]:
        """This rank's share of a linear into the MLP's inside, weight and bias; of the `part`-th of `parts` such that
        lie behind each other in one tensor."""
        size = self.spec.intermediate_size
        rows = (part * size + self.columns[0], part * size + self.columns[1])
        weight = self.tensors.weight(name, (parts * size, self.spec.hidden_size), rows)
        return weight, self.tensors.bias(name, parts * size, rows) if self.spec.mlp_bias else None
