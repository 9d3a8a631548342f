"""Targets: which model of a config a trial measures, and what the trial is told of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from deploy.catalog import fingerprint
from deploy.config import ClusterConfig, ConfigError, Environment, load
from deploy.machine import physical_cores
from deploy.sections import ModelSection
from deploy.settings import group_settings
from workers.settings import GroupSettings


def pick(path: Path | None, model: str | None) -> tuple[ClusterConfig, ModelSection]:
    """The config of the file `path` (None: defaults), and the section that `model` means: of several the one with that
    name, else the only one, with `model` instead of its own. Raises ConfigError."""
    config = load(path)
    if not config.models:
        config = load(path, {"model": model})
        return config, config
    for section in config.models:
        if model in (section.model, *section.names):
            return config, section
    known = ", ".join(section.names[0] for section in config.models)
    raise ConfigError(f"--model: {path} has several models, and one is wanted: {known}")


def trial_settings(
    config: ClusterConfig, section: ModelSection, folder: Path, environment: Environment
) -> GroupSettings:
    """What a trial is told of the model of `section`, which lies in `folder`: one rank with all cores, on the device of
    the config ("auto" is left to the trial)."""
    cores = physical_cores()
    settings = group_settings(
        config, section, folder, fingerprint(folder), device=config.device, cores=cores, environment=environment
    )
    return replace(settings, tensor_parallel_size=1, threads=section.threads or cores)
