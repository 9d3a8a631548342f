"""From a model's folder to its spec, and from its spec to the model: native where this project has modules for it, else
through transformers. Knows the two kinds of models and what both can do; loads transformers only for the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvstore.shards import HeadShard
from workers.attention.backend import AttentionBackend, AttentionRule
from workers.batch import Batch
from workers.kernels import Kernels
from workers.models.decoder import Decoder
from workers.models.document import load_object
from workers.models.generic.spec import GenericSpec
from workers.models.identity import is_native
from workers.models.reading import read_native
from workers.models.spec import ModelSpec
from workers.parallel import Communicator
from workers.weights import Checkpoint

Spec = ModelSpec | GenericSpec


class Model(Protocol):
    """One rank's share of a model: `shard` are its attention heads, `widths` how many logits each rank computes,
    `rules` what attention does in each layer."""

    @property
    def shard(self) -> HeadShard: ...
    @property
    def widths(self) -> tuple[int, ...]: ...
    @property
    def rules(self) -> tuple[AttentionRule, ...]: ...

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden states [T, hidden] of the step's tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits fp32 [S, widths[rank]] of hidden states [S, hidden]."""
        ...


def read_spec(folder: Path) -> Spec:
    """The spec of the model in `folder`; seconds for one that is not native. Raises Unsupported."""
    config = load_object(folder / "config.json")
    if config is None or is_native(config):
        return read_native(folder)
    from workers.models.generic.walk import describe  # loads transformers, which takes seconds

    return describe(folder)


def load_model(
    spec: Spec,
    folder: Path,
    *,
    comm: Communicator,
    kernels: Kernels,
    dtype: str,
    device: torch.device,
    weight_precision: str = "auto",
    checks: Path | None = None,
    revision: str = "",
) -> Model:
    """The weights of rank `comm.rank`, read from `folder`. A model that is not native checks itself first; `checks` is
    the folder where it remembers that it has, for the weights that `revision` identifies. Raises Unsupported,
    WeightError, or ValueError for more ranks than query heads."""
    if isinstance(spec, ModelSpec):
        with Checkpoint(folder, spec.fp8_block) as checkpoint:
            model = Decoder(spec, checkpoint, comm=comm, kernels=kernels, dtype=dtype, device=device)
            checkpoint.finish()
            return model
    spec.shards(comm.world)
    spec.check_weights(weight_precision)
    from workers.models.generic.model import GenericModel
    from workers.models.generic.selfcheck import SelfCheck

    generic = GenericModel(spec, folder, kernels=kernels, dtype=dtype, device=device)
    SelfCheck(checks, revision).demand(generic, spec, kernels, device)
    return generic
