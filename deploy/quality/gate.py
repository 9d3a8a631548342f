"""The gate: a service starts with a KV precision only once it is known what that costs the model, and within limits.

What is measured is kept in the cache folder, by everything that the figures depend on: a start pays for it once. Which
precisions are looked at, and what follows, the config says (QualitySection). Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.config import ClusterConfig, ConfigError, Environment
from deploy.description import described
from deploy.quality.dialogue import digest
from deploy.quality.figures import Cost
from deploy.quality.job import Job
from deploy.quality.launch import Run, Say, TrialError, run_trial
from deploy.quality.targets import trial_settings
from deploy.sections import ModelSection
from kvstore.layout import Precision
from kvstore.precisions import PrecisionMap
from workers.native.processor import Processor
from workers.rank import short_dtype

log = logging.getLogger(__name__)

WORKERS = Path(__file__).resolve().parents[2] / "workers"
_BITS = {"off": 0, "auto": 8, "warn": 16, "refuse": 16}
"""Precisions of fewer bits than this are measured."""
_WHAT_HELPS = (
    "`tidegate quality` shows what each precision costs, `tidegate quality --search` finds the most compact map that "
    "passes; the limits stand under quality, and quality: {gate: off} starts without looking"
)


def admitted(
    config: ClusterConfig,
    folders: Sequence[Path],
    say: Say,
    *,
    run: Run | None = run_trial,
    environment: Environment | None = None,
) -> ClusterConfig:
    """`config`, whose models lie in `folders`, with the maps that were searched for in it. Raises ConfigError for a
    precision that costs more than it may. `run` None: nothing is measured here, and what is not known yet is said."""
    gate = _Gate(config, say, run, environment or Environment.read())
    sections = [gate.admit(section, folder) for section, folder in zip(config.sections, folders, strict=True)]
    if config.models:
        return config.model_copy(update={"models": tuple(sections)})
    return config.model_copy(update={"kv_precision": sections[0].kv_precision})


class _Gate:
    def __init__(self, config: ClusterConfig, say: Say, run: Run | None, environment: Environment) -> None:
        self._config = config
        self._say = say
        self._run = run
        self._environment = environment

    def admit(self, section: ModelSection, folder: Path) -> ModelSection:
        """`section` as it may start."""
        if section.quality.search:
            return section.model_copy(update={"kv_precision": self._searched(section, folder)})
        spec = described(folder)
        dtype = short_dtype(spec.dtype) if section.dtype == "auto" else section.dtype
        precision = section.kv_precision.settle(Precision.parse(dtype))
        bits = min(min(stored.key.bits, stored.value.bits) for stored in precision.of(spec.layers))
        if bits < _BITS[section.quality.gate]:
            self._check(section, folder, precision.spelled(spec.layers))
        return section

    def _check(self, section: ModelSection, folder: Path, label: str) -> None:
        """Raise ConfigError, or warn, when the section's precision is beyond its limits."""
        quality, name = section.quality, section.names[0]
        job = self._job(section, folder, maps=(section.kv_precision,))
        try:
            found = self._known(job, f"checking kv_precision of {name}")
        except TrialError as error:
            return self._object(section, f"kv_precision {label} of {name} could not be measured: {error}")
        if found is None:
            log.warning("kv_precision %s of %s has not been measured here: %s", label, name, _WHAT_HELPS)
            return None
        row = found["rows"][0]
        if fault := row.get("fault"):
            return self._object(section, f"kv_precision {label} is not possible with {name}: {fault}")
        faults = quality.limits().faults(Cost.parse(row["cost"]))
        if faults:
            told = (
                f"kv_precision {label} costs {name} too much, on {row['cost']['tokens']:,} tokens: {'; '.join(faults)}"
            )
            self._object(section, told)
        return None

    def _object(self, section: ModelSection, text: str) -> None:
        if section.quality.gate != "warn":
            raise ConfigError(f"{text}.\n{_WHAT_HELPS}")
        log.warning("%s", text)

    def _searched(self, section: ModelSection, folder: Path) -> PrecisionMap:
        """The most compact map that passes."""
        quality, name = section.quality, section.names[0]
        job = self._job(section, folder, limits=quality.limits(), budget=quality.budget_bytes_per_token)
        try:
            found = self._known(job, f"searching kv_precision of {name}")
        except TrialError as error:
            raise ConfigError(f"no kv_precision could be searched for {name}: {error}") from error
        if found is None:
            raise ConfigError(
                f"quality: search is on, and no map for {name} is known here: run `tidegate quality --search` and set "
                "the kv_precision that it prints"
            )
        best = found["found"]
        if best["faults"]:
            raise ConfigError(f"no kv_precision for {name} passes within its budget: {'; '.join(best['faults'])}")
        self._say(f"found kv_precision of {name}, {best['label']}")
        return PrecisionMap.parse(best["precision"])

    def _job(self, section: ModelSection, folder: Path, **wanted: Any) -> Job:
        settings = trial_settings(self._config, section, folder, self._environment)
        return Job(settings, section.quality.context, **wanted)

    def _known(self, job: Job, stage: str) -> dict[str, Any] | None:
        """What a trial of `job` gives: from the cache folder, else measured and put there; None where that may not
        be."""
        path = self._environment.cache / "quality" / f"{_key(job)}.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError):  # not there, or cut short
            pass
        if self._run is None:
            return None
        self._say(stage)
        found = self._run(job, lambda text: self._say(f"{stage}: {text}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
        return found


def _key(job: Job) -> str:
    """What the figures of a job depend on: the job itself, where the model is named by its files' identity, the text,
    the code that computes and the CPU it computes on."""
    plain = job.plain
    settings = {key: plain["settings"][key] for key in ("revision", "dtype", "kernels", "weight_precision", "device")}
    facts = {**plain, "settings": settings, "text": digest(), "code": code_digest(), "cpu": Processor.read().name}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def code_digest(folder: Path = WORKERS) -> str:
    """What identifies the sources under `folder`."""
    total = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".cpp", ".h")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(folder)}:{len(content)}:".encode() + content)
    return total.hexdigest()
