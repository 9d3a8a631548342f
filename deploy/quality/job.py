"""Job: what a trial of KV precisions is told, as plain values for the process that it runs in. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from deploy.quality.figures import Limits
from kvstore.precisions import PrecisionMap
from workers.settings import GroupSettings

RUNGS: tuple[object, ...] = ("int4", {"k": "int8", "v": "int4"}, "int8", "auto")
"""What a search chooses from, layer by layer, the most compact first."""
SHORT = 256
"""Tokens on which a single layer is measured."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to do with the model of `settings` (whose device may be "auto"): measure `maps`, each as PrecisionMap.parse
    takes it, or where `limits` are search a map within `budget` bytes per token. `context` tokens of the text, `turns`
    of the dialogue, greedy continuations or not."""

    settings: GroupSettings
    context: int
    maps: tuple[PrecisionMap, ...] = ()
    turns: int = 0
    greedy: bool = False
    limits: Limits | None = None
    budget: int | None = None

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Self:
        """What `plain` says."""
        limits = plain["limits"]
        return cls(
            settings=GroupSettings.parse(plain["settings"]),
            context=plain["context"],
            maps=tuple(PrecisionMap.parse(each) for each in plain["maps"]),
            turns=plain["turns"],
            greedy=plain["greedy"],
            limits=Limits(**limits) if limits else None,
            budget=plain["budget"],
        )

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        plain = asdict(self)
        return plain | {"settings": self.settings.plain, "maps": [each.plain for each in self.maps]}
