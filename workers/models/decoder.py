"""Decoder: one rank's share of a decoder-only model with paged attention, put together from parts at load time.

Heads, MLP columns and vocabulary are split over the ranks, unevenly where they do not divide; a bias after a reduction
is added by rank 0 alone. Reductions are in fp32. It keeps no sequence state. Which parts a family needs is for
workers/models/assembly.py to say, what a layer does with them for workers/models/layer.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.shards import HeadShard, split_evenly
from workers.attention.backend import AttentionBackend
from workers.batch import Batch
from workers.kernels import Kernels
from workers.models.assembly import Assembly
from workers.models.layer import Step
from workers.models.spec import ModelSpec
from workers.parallel import Communicator
from workers.rotation import Rotation
from workers.weights import Checkpoint


class Decoder:
    """The weights of rank `comm.rank` out of `comm.world`, read from `checkpoint`.

    Raises WeightError for a tensor that is missing or does not fit, and ValueError when there are more ranks than query
    heads. `dtype` is the weights' own (fp32, bf16, fp16); activations have the kernel's.
    `rules` are what an attention backend for this model has to do, layer by layer.
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
        self._comm = comm
        self.shard: HeadShard = spec.shards(comm.world)[comm.rank]
        self.widths = tuple(stop - start for start, stop in split_evenly(spec.vocab_size, comm.world))
        self._replay = kernels.replay
        self._streams = _Room((spec.hidden_size,), kernels.stream, device)
        dim = spec.rotary_dim
        self._turns = tuple(_Turns(Rotation(rope, dim, device), dim, device) for rope in spec.ropes)
        assembly = Assembly(spec, checkpoint, comm, kernels, dtype, device)
        self._embedding = assembly.embedding()
        self._layers = [assembly.layer(index) for index in range(spec.layers)]
        self._norm = assembly.final_norm()
        self._head = assembly.head()
        self.rules = tuple(assembly.rule(index) for index in range(spec.layers))
        # What ranks exchange is no kernel's, and which experts compute is another matter in each step.
        self._replays = comm.world == 1 and spec.experts is None and spec.latent is None

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden states [T, hidden] after the last layer, before the final norm."""
        turns = tuple(each.at(batch.positions) for each in self._turns)
        step = Step(attention, attention.prepare(batch), turns or (None,))
        stream = self._embedding.into(self._streams.of(len(batch.tokens)), batch.tokens, batch.positions)
        if self._replays:
            return self._replay(attention, (stream, *turns), lambda: self._through(stream, step))
        return self._through(stream, step)

    def _through(self, stream: Tensor, step: Step) -> Tensor:
        """All layers."""
        for layer in self._layers:
            stream = layer(stream, step)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits fp32 [S, widths[rank]] of hidden states [S, hidden]."""
        return self._head(self._norm(hidden))


class _Turns:
    """The turns of one rope, in the same memory for every step of one size."""

    def __init__(self, rotation: Rotation, head_dim: int, device: torch.device) -> None:
        self._rotation = rotation
        self._room = _Room((1, head_dim // 2), torch.complex64, device)

    def at(self, positions: Tensor) -> Tensor:
        """complex64 [T, 1, head_dim / 2]."""
        return self._room.of(len(positions)).copy_(self._rotation.at(positions))


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
