"""The parts of the operator's config: what is set per model, the waiting line, the ladder; and the kinds of values.

Pydantic checks each value where it stands. Knows no file, no environment and nothing of how a part is carried out; the
defaults of line and ladder are those of `cluster.coordination.terms`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictInt,
    field_validator,
)
from pydantic_core.core_schema import ValidationInfo

from cluster.coordination.terms import LineBounds, Thresholds
from deploy.quality.figures import FEWEST, Limits
from deploy.sizes import parse_size
from kvstore.precisions import AUTOMATIC, LONG_NAMES, PrecisionMap
from workers.native.processor import VARIANTS
from workers.settings import KERNELS, WEIGHT_PRECISIONS

DEFAULT_MODEL = "smollm2-135m"
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
_EVERY_KERNEL = (*KERNELS, *(f"native-{variant.name}" for variant in VARIANTS))
_BLOCK_SIZES = (16, 32, 64, 128)
_LINE = LineBounds()
_LADDER = Thresholds()
_LIMITS = Limits()
_NEVER = float("inf")


def _on_off(value: object) -> object:
    """YAML reads a bare on/off as a boolean; quoted it stays text. Both are fine."""
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


def _off_word(value: object) -> object:
    """YAML reads a bare off as false."""
    return "off" if value is False else value


def _one_of(*supported: str) -> BeforeValidator:
    """One of these words; precisions may have torch's long names."""

    def check(value: object) -> object:
        name = LONG_NAMES.get(value, value) if isinstance(value, str) else value
        if name not in supported:
            raise ValueError(f"{value!r} is not supported; supported: {', '.join(supported)}")
        return name

    return BeforeValidator(check)


def _precision_map(value: object) -> PrecisionMap:
    return value if isinstance(value, PrecisionMap) else PrecisionMap.parse(value)


def _one_or_more(value: object) -> object:
    """One name may stand without a list around it."""
    return (value,) if isinstance(value, str) else value


Count = Annotated[StrictInt, Field(ge=1)]
Size = Annotated[int, BeforeValidator(parse_size)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Forecast = Annotated[float, Field(gt=0, le=2)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Text = Annotated[str, Field(min_length=1)]
Dtype = Annotated[str, _one_of(*PRECISIONS)]
KVPrecision = Annotated[PrecisionMap, PlainValidator(_precision_map), PlainSerializer(lambda given: given.plain)]
KernelName = Annotated[str, _one_of(*_EVERY_KERNEL)]
WeightPrecision = Annotated[str, _one_of(*WEIGHT_PRECISIONS)]
Switch = Annotated[bool, Field(strict=True), BeforeValidator(_on_off)]
Names = Annotated[tuple[Text, ...], BeforeValidator(_one_or_more)]


class Section(BaseModel):
    """A frozen mapping without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, protected_namespaces=())


class QualitySection(Section):
    """What a KV precision may cost, before a service starts with it; what the limits mean stands at `Limits`.

    `gate` auto: precisions of fewer than 8 bits are measured, and refused beyond the limits; refuse: all that quantise
    are; warn: all are measured, and what is beyond is said; off: nothing is measured. `search`: the most compact map
    that passes is looked for, within `budget_bytes_per_token` over all layers. `context` tokens are measured.
    """

    gate: Annotated[Literal["auto", "off", "warn", "refuse"], BeforeValidator(_off_word)] = "auto"
    search: Switch = False
    budget_bytes_per_token: Count | None = None
    max_kl: Annotated[float, Field(gt=0)] = _LIMITS.max_kl
    min_top1: Annotated[float, Field(ge=0, lt=1)] = _LIMITS.min_top1
    max_perplexity_rise: Annotated[float, Field(gt=0)] = _LIMITS.max_perplexity_rise
    context: Annotated[StrictInt, Field(ge=FEWEST)] = 1024

    @field_validator("budget_bytes_per_token")
    @classmethod
    def _for_a_search(cls, budget: int | None, info: ValidationInfo) -> int | None:
        if budget is not None and not info.data.get("search"):
            raise ValueError("is for a search: set search: on beside it")
        return budget

    def limits(self) -> Limits:
        """The same for a verdict."""
        return Limits(self.max_kl, self.min_top1, self.max_perplexity_rise)

    @classmethod
    def switched(cls, value: object) -> object:
        """`quality: off` is short for a gate that is."""
        return {"gate": "off"} if _off_word(value) == "off" else value


Quality = Annotated[QualitySection, BeforeValidator(QualitySection.switched)]


class ModelSection(Section):
    """One model and the groups that run it. `kv_memory` is per rank. `threads` is per rank too; None: one on a GPU, on
    a CPU the physical cores divided by the ranks of all models. `placement`: a group has its ranks on one node, or on
    as few nodes as have room for them."""

    model: Text = DEFAULT_MODEL
    revision: Text | None = None
    served_model_names: Names = ()

    groups: Count = 1
    tensor_parallel_size: Count = 1
    placement: Literal["node", "nodes"] = "node"
    dtype: Dtype = "auto"
    kernels: KernelName = "auto"
    weight_precision: WeightPrecision = "auto"
    threads: Count | None = None

    block_size: StrictInt = 32
    kv_precision: KVPrecision = AUTOMATIC
    quality: Quality = QualitySection()
    kv_memory: Size | None = None
    prefix_cache: Switch = True

    max_model_len: Count | None = None
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 512
    overlap: Annotated[StrictInt, Field(ge=1, le=2)] = 1

    @field_validator("served_model_names")
    @classmethod
    def _distinct(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) != len(names):
            raise ValueError(f"names a model twice: {', '.join(names)}")
        return names

    @field_validator("weight_precision")
    @classmethod
    def _kernels_for_it(cls, precision: str, info: ValidationInfo) -> str:
        kernels = info.data.get("kernels", "auto")
        if precision == "int8" and not kernels.startswith(("auto", "native")):
            raise ValueError(f"int8 needs kernels: native (or auto), got {kernels}")
        return precision

    @field_validator("block_size")
    @classmethod
    def _block_size(cls, size: int) -> int:
        if size not in _BLOCK_SIZES:
            raise ValueError(f"must be one of {', '.join(map(str, _BLOCK_SIZES))} tokens, got {size}")
        return size

    @field_validator("quality")
    @classmethod
    def _one_choice(cls, quality: QualitySection, info: ValidationInfo) -> QualitySection:
        if quality.search and info.data.get("kv_precision", AUTOMATIC) != AUTOMATIC:
            raise ValueError("search: on chooses kv_precision; leave that key out, or set it to auto")
        return quality

    @field_validator("max_num_batched_tokens")
    @classmethod
    def _step_budget(cls, tokens: int, info: ValidationInfo) -> int:
        for key, why in (
            ("block_size", "a step must be able to fill a block"),
            ("max_num_seqs", "every running request takes one token of a step"),
        ):
            least = info.data.get(key)
            if least is not None and tokens < least:
                raise ValueError(f"must be at least {key} ({least}), got {tokens}: {why}")
        return tokens

    @property
    def names(self) -> tuple[str, ...]:
        """The names clients may use: `served_model_names`, else the model's own (the last part of a path)."""
        if self.served_model_names:
            return self.served_model_names
        is_path = self.model.startswith(("/", ".", "~"))
        if not is_path:
            return (self.model,)
        return (Path(self.model).expanduser().resolve().name.removesuffix(".gguf"),)

    @property
    def model_ranks(self) -> int:
        """Ranks of this model's groups together."""
        return self.groups * self.tensor_parallel_size


class LineSection(Section):
    """The waiting line; what the keys mean stands at `LineBounds`."""

    requests: Count = _LINE.requests
    tokens: Count = _LINE.tokens
    aging_s: Seconds = _LINE.aging_s
    batch_s: Seconds = _LINE.batch_s
    bypasses: Annotated[StrictInt, Field(ge=0)] = _LINE.bypasses
    bypass_s: Seconds = _LINE.bypass_s

    def bounds(self) -> LineBounds:
        """The same for the coordinator."""
        return LineBounds(**self.model_dump())


class LadderSection(Section):
    """The ladder's thresholds; what the keys mean stands at `Thresholds`. `enabled` off: it never goes up."""

    enabled: Switch = True
    trim_up: Fraction = _LADDER.trim_up
    trim_down: Fraction = _LADDER.trim_down
    shrink_up: Forecast = _LADDER.shrink_up
    shrink_down: Forecast = _LADDER.shrink_down
    refuse_up: Fraction = _LADDER.refuse_up
    refuse_down: Fraction = _LADDER.refuse_down
    dwell_up_s: Annotated[float, Field(ge=0, le=3600)] = _LADDER.dwell_up_s
    dwell_down_s: Annotated[float, Field(ge=0, le=3600)] = _LADDER.dwell_down_s

    @field_validator("trim_down", "shrink_down", "refuse_down")
    @classmethod
    def _below(cls, down: float, info: ValidationInfo) -> float:
        """A level that goes up and down at the same place would flap."""
        up_key = f"{(info.field_name or '').removesuffix('_down')}_up"
        up = info.data.get(up_key)
        if up is not None and down >= up:
            raise ValueError(f"must be below {up_key} ({up:g}), got {down:g}")
        return down

    @field_validator("refuse_up", "refuse_down")
    @classmethod
    def _ordered(cls, value: float, info: ValidationInfo) -> float:
        """Both trim and refuse look at what is held: the higher level must not begin, or end, below the lower one."""
        lower_key = (info.field_name or "").replace("refuse", "trim")
        lower = info.data.get(lower_key)
        if lower is not None and value < lower:
            raise ValueError(f"must be at least {lower_key} ({lower:g}), got {value:g}")
        return value

    def thresholds(self) -> Thresholds:
        """The same for the coordinator."""
        values: dict[str, float] = self.model_dump(exclude={"enabled"})
        return Thresholds(**values if self.enabled else values | dict.fromkeys(_UPS, _NEVER))

    @classmethod
    def switched(cls, value: object) -> object:
        """`ladder: off` is short for a section that is not enabled."""
        plain = _on_off(value)
        return {"enabled": plain} if isinstance(plain, bool) else value


_UPS = ("trim_up", "shrink_up", "refuse_up")
Ladder = Annotated[LadderSection, BeforeValidator(LadderSection.switched)]
