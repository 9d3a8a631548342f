"""Shapes of parts that some decoders have: MLA's latents, mixtures of experts. No torch, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from workers.models.rope import Unsupported


@dataclass(frozen=True, slots=True)
class LatentShape:
    """MLA (DeepSeek-V2, arXiv 2405.04434 section 2.1), in elements: a latent of `rank` and a rotated key of `rope` per
    token; a head's query has `nope` that are not rotated and `rope` that are, its value has `values`. Queries pass
    through `q_rank` where that is not None. `interleaved`: rotated pairs lie next to each other in the checkpoint;
    `biased`: linears into latents have a bias. `norm_eps` is that of the latents' norms."""

    rank: int
    rope: int
    nope: int
    values: int
    q_rank: int | None
    interleaved: bool
    biased: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        sizes = {"kv_lora_rank": self.rank, "qk_rope_head_dim": self.rope, "qk_nope_head_dim": self.nope}
        for name, size in sizes.items():
            if size % 2:
                raise Unsupported(f"config field {name} must be even, got {size}")

    @property
    def query(self) -> int:
        """Of one head's query."""
        return self.nope + self.rope

    def expands(self, queries: int) -> bool:
        """Whether it takes fewer multiplications to make keys and values of a latent than to let so many queries look
        at the latent itself: what the former costs, against what each query saves. (DeepSeek-V3: from 171 on.)"""
        width = self.nope + self.values
        return queries * (2 * self.rank - width) > self.rank * width


class Scoring(Enum):
    """What makes scores of a router's logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """Which `chosen` of the experts a token goes to: those with the highest scores, of the `open_groups` best of
    `groups` equal groups, where a group is as good as the sum of its `deciding` highest scores. `corrected`: for the
    choice, not for the weights, a bias is added to each score. Weights are scores, made to sum up to 1 if `normalised`,
    times `scale`. (DeepSeek-V2, arXiv 2405.04434 section 2.2; DeepSeek-V3, arXiv 2412.19437 section 2.1.2.)"""

    chosen: int
    scoring: Scoring = Scoring.SOFTMAX
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    open_groups: int = 1
    deciding: int = 1
    corrected: bool = False


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Mixtures of experts (arXiv 1701.06538) in place of some layers' MLPs: `sparse` says in which. `experts` of
    `columns` each, and `shared` columns that every token takes. `prefixes`: what may stand before the tensors' names;
    `parts` are an expert's gate, up and down."""

    experts: int
    columns: int
    shared: int
    sparse: tuple[bool, ...]
    routing: Routing
    prefixes: tuple[str, ...] = ("mlp.",)
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def __post_init__(self) -> None:
        routing = self.routing
        if self.experts % routing.groups or routing.open_groups > routing.groups:
            raise Unsupported(
                f"{self.experts} experts in {routing.groups} groups (n_group), {routing.open_groups} of them chosen "
                "(topk_group), are not supported"
            )
        if routing.chosen > self.experts // routing.groups * routing.open_groups:
            raise Unsupported(f"num_experts_per_tok {routing.chosen} is more than the experts that may be chosen")
