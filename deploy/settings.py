"""From the operator's config to what groups, ingresses and the coordinator are told. Pure: values in, values out.

Paths become absolute here, because no other process shares this one's working directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.coordination.terms import CoordinatorTerms
from cluster.settings import CoordinatorSettings, IngressSettings, ModelSettings
from deploy.config import ClusterConfig, Environment
from deploy.sections import ModelSection
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
    named = environment.namespace_secret_file
    secrets = config.namespace_secret_file or ((named,) if named else ())
    models = zip(config.sections, folders, revisions, strict=True)
    return IngressSettings(
        models=tuple(
            ModelSettings(str(folder), section.names, revision, section.max_model_len)
            for section, folder, revision in models
        ),
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


def coordinator_settings(config: ClusterConfig, identity: str) -> CoordinatorSettings:
    """What the coordinator is told; `identity` tells this deployment from another of the same service."""
    terms = CoordinatorTerms(line=config.line.bounds(), ladder=config.ladder.thresholds())
    return CoordinatorSettings(config.service_name, identity, terms)


def native_folder(cache: Path) -> Path:
    """Where compiled kernels are kept; `cache` is Environment's."""
    return (cache / "native").absolute()


def _absolute(name: str | None) -> str | None:
    return str(Path(name).expanduser().absolute()) if name else None
