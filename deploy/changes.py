"""How far a change of each config key reaches: who runs takes it, groups are replaced one by one, or all is new.

The one table of that, and the difference of two configs by it. A test walks the config: a key without a class fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from deploy.config import ClusterConfig
from deploy.sections import ModelSection


class Reach(Enum):
    """LIVE: those that run take it within a heartbeat. WITHIN: live up to what the groups were built with, beyond that
    ROLLING: groups and ingresses are replaced one by one. NEW: the service has to be ended and started anew, since
    clients or running answers depend on it."""

    LIVE = "live"
    WITHIN = "live up to what the groups were built with"
    ROLLING = "one group at a time"
    NEW = "new cluster"


def _all(reach: Reach, keys: str) -> dict[str, Reach]:
    return dict.fromkeys(keys.split(), reach)


REACH: dict[str, Reach] = {
    **_all(Reach.LIVE, "api_keys_file namespace_secret_file public_prompts_file cache_scope session_ttl_s log_level"),
    **_all(Reach.LIVE, "max_keep_alive_s session_blocks tenant_blocks request_timeout_s prefix_cache"),
    **_all(Reach.LIVE, "line.requests line.tokens line.aging_s line.batch_s line.bypasses line.bypass_s"),
    **_all(Reach.LIVE, "ladder.enabled ladder.trim_up ladder.trim_down ladder.shrink_up ladder.shrink_down"),
    **_all(Reach.LIVE, "ladder.refuse_up ladder.refuse_down ladder.dwell_up_s ladder.dwell_down_s"),
    **_all(Reach.WITHIN, "max_num_seqs max_num_batched_tokens"),
    **_all(Reach.ROLLING, "groups tensor_parallel_size dtype kernels weight_precision threads block_size kv_precision"),
    **_all(Reach.ROLLING, "kv_memory max_model_len overlap gpu_memory_utilization cpu_memory_utilization"),
    **_all(Reach.ROLLING, "quality.gate quality.search quality.budget_bytes_per_token quality.max_kl quality.min_top1"),
    **_all(Reach.ROLLING, "quality.max_perplexity_rise quality.context ingress_replicas body_limit stream_comment_s"),
    **_all(Reach.ROLLING, "streams stream_pace_s drain_s step_timeout_s flight_dir update placement max_logprobs"),
    **_all(Reach.NEW, "models model revision served_model_names service_name device host port proxy allow_remote"),
}
"""By key; keys of a part are written behind it, those of a model alike wherever it stands."""

Plain = Any
"""A value as JSON has it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A key, as it stands in the file; its value before and after; what it takes (never WITHIN)."""

    key: str
    before: Plain
    after: Plain
    reach: Reach

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} → {_shown(self.after)} ({self.reach.value})"

    @property
    def plain(self) -> dict[str, Plain]:
        """As JSON."""
        return {"key": self.key, "before": self.before, "after": self.after, "reach": self.reach.value}


def differences(old: ClusterConfig, new: ClusterConfig, built: ClusterConfig | None = None) -> tuple[Change, ...]:
    """What changes from `old` to `new`, in the config's order, while groups run that were built for `built` (None: for
    `old`)."""
    built = built or old
    changes = [*_changes("", _service(old), _service(new), _service(built))]
    before, after = ([section.names[0] for section in config.sections] for config in (old, new))
    if before != after and (old.models or new.models):
        changes.append(Change("models", before, after, Reach.NEW))
    for section, other, index in _pairs(old, new):
        prefix = f"models.{index}." if new.models else ""
        stood = next((one for one in built.sections if one.names[0] == section.names[0]), section)
        changes += _changes(prefix, _model(section), _model(other), _model(stood))
    return tuple(changes)


def beyond_live(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Those that need more than that those who run take them in."""
    return tuple(change for change in changes if change.reach is not Reach.LIVE)


def _pairs(old: ClusterConfig, new: ClusterConfig) -> Iterator[tuple[ModelSection, ModelSection, int]]:
    """The models that both have, by their names; a single one is the same one whatever it is called."""
    if len(old.sections) == len(new.sections) == 1:
        yield old.sections[0], new.sections[0], 0
        return
    known = {section.names[0]: section for section in old.sections}
    for index, section in enumerate(new.sections):
        if section.names[0] in known:
            yield known[section.names[0]], section, index


def _changes(prefix: str, old: dict[str, Plain], new: dict[str, Plain], built: dict[str, Plain]) -> Iterator[Change]:
    for key in new:
        if old[key] != new[key]:
            reach = REACH[key]
            if reach is Reach.WITHIN:
                reach = Reach.LIVE if new[key] <= built[key] else Reach.ROLLING
            yield Change(prefix + key, old[key], new[key], reach)


def _service(config: ClusterConfig) -> dict[str, Plain]:
    own = set(ClusterConfig.model_fields) - set(ModelSection.model_fields) - {"models"}
    return _flat(config.model_dump(mode="json", include=own))


def _model(section: ModelSection) -> dict[str, Plain]:
    return _flat(section.model_dump(mode="json", include=set(ModelSection.model_fields)))


def _flat(values: dict[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Parts opened; what only looks like one (a map of precisions) is one value."""
    flat: dict[str, Plain] = {}
    for key, value in values.items():
        is_part = isinstance(value, dict) and not prefix and key not in REACH
        flat.update(_flat(value, f"{key}.") if is_part else {prefix + key: value})
    return flat


def _shown(value: Plain) -> str:
    return "not set" if value is None else str(value)
