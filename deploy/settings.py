"""From the operator's config to what groups, ingresses and the coordinator are told. Pure: values in, values out.

Paths become absolute here, because no other process shares this one's working directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from cluster.coordination.terms import CoordinatorTerms
from cluster.settings import CoordinatorSettings, IngressSettings, LiveSettings, ModelSettings
from deploy.config import ClusterConfig, Environment
from deploy.sections import ModelSection
from workers.orders import GroupTerms
from workers.settings import GroupSettings


def group_settings(
    config: ClusterConfig,
    section: ModelSection,
    folder: Path,
    revision: str,
    *,
    device: str,
    cores: int,
    environment: Environment,
) -> GroupSettings:
    """What each group of the model in `section` is told. `folder` holds the model, `revision` identifies its weights;
    `device` is "cpu" or "cuda" (the caller has resolved "auto"); `cores` are the physical cores of a node that all
    ranks share; under `environment`'s cache is kept what the ranks compile."""
    on_gpu = device == "cuda"
    share = config.gpu_memory_utilization if on_gpu else config.cpu_memory_utilization / config.ranks
    return GroupSettings(
        model_dir=str(folder),
        model_names=section.names,
        revision=revision,
        tensor_parallel_size=section.tensor_parallel_size,
        dtype=section.dtype,
        kv_precision=section.kv_precision,
        device=device,
        kernels=section.kernels,
        weight_precision=section.weight_precision,
        native_dir=str(native_folder(environment.cache)),
        checks_dir=str((environment.cache / "checks").absolute()),
        block_size=section.block_size,
        kv_memory=section.kv_memory,
        memory_fraction=share,
        max_model_len=section.max_model_len,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        prefix_cache=section.prefix_cache,
        session_ttl_s=config.session_ttl_s,
        overlap=section.overlap,
        threads=section.threads or (1 if on_gpu else max(1, cores // config.ranks)),
        streams=_streams(config, environment),
        stream_pace_s=config.stream_pace_s,
        step_timeout_s=config.step_timeout_s,
        flight_dir=_absolute(config.flight_dir),
    )


def _streams(config: ClusterConfig, environment: Environment) -> str:
    """What is encrypted must not leave by a way that is not."""
    if config.streams != "auto":
        return config.streams
    return "ray" if environment.encrypted else "socket"


def ingress_settings(
    config: ClusterConfig, folders: Sequence[Path], revisions: Sequence[str], environment: Environment
) -> IngressSettings:
    """What each ingress replica is told; one folder and one revision per model, in the config's order."""
    models = zip(config.sections, folders, revisions, strict=True)
    served = tuple(
        ModelSettings(str(folder), section.names, revision, section.max_model_len)
        for section, folder, revision in models
    )
    return door_settings(config, served, environment)


def door_settings(
    config: ClusterConfig, models: tuple[ModelSettings, ...], environment: Environment
) -> IngressSettings:
    """What each ingress replica is told, given what it is told of the models."""
    named = environment.namespace_secret_file
    secrets = config.namespace_secret_file or ((named,) if named else ())
    return IngressSettings(
        models=models,
        service=config.service_name,
        secret_files=tuple(str(Path(name).expanduser().absolute()) for name in secrets),
        keys_file=_absolute(config.api_keys_file),
        public_file=_absolute(config.public_prompts_file),
        cache_scope=config.cache_scope,
        session_ttl_s=config.session_ttl_s,
        body_limit=config.body_limit,
        drain_s=config.drain_s,
        timeout_s=config.request_timeout_s,
        comment_s=config.stream_comment_s,
        max_logprobs=config.max_logprobs,
        session_blocks=config.session_blocks,
        tenant_blocks=config.tenant_blocks,
        max_keep_s=config.max_keep_alive_s,
    )


def coordinator_settings(
    config: ClusterConfig, identity: str, ingress: IngressSettings | None = None, version: str = ""
) -> CoordinatorSettings:
    """What the coordinator is told; `identity` tells this deployment from another of the same service, `version` the
    code from another. `ingress` is what the ingresses are told."""
    terms = CoordinatorTerms(line=config.line.bounds(), ladder=config.ladder.thresholds())
    live = live_settings(config, ingress)
    return CoordinatorSettings(
        config.service_name,
        identity,
        terms,
        version=version,
        live=live,
        source=source_of(config),
        digest=digest_of(config),
    )


def live_settings(config: ClusterConfig, ingress: IngressSettings | None) -> LiveSettings:
    """What of `config` reaches those that run without a restart."""
    return LiveSettings(
        line=config.line.bounds(),
        ladder=config.ladder.thresholds(),
        groups=tuple(
            (
                section.names[0],
                GroupTerms(
                    session_ttl_s=config.session_ttl_s,
                    prefix_cache=section.prefix_cache,
                    max_num_seqs=section.max_num_seqs,
                    max_num_batched_tokens=section.max_num_batched_tokens,
                ),
            )
            for section in config.sections
        ),
        ingress=ingress,
        log_level=config.log_level,
    )


def source_of(config: ClusterConfig) -> str:
    """The keys that were set, as JSON: `ClusterConfig.model_validate_json` makes the same config of it."""
    return config.model_dump_json(exclude_unset=True)


def digest_of(config: ClusterConfig) -> str:
    """The same for the same config, whichever of its keys were written down."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]


def native_folder(cache: Path) -> Path:
    """Where compiled kernels are kept; `cache` is Environment's."""
    return (cache / "native").absolute()


def _absolute(name: str | None) -> str | None:
    return str(Path(name).expanduser().absolute()) if name else None
