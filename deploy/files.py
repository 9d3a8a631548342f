"""The files that a config names: can they be read, and do they hold what they should? Looked at before anything starts;
the replicas read them for themselves, on their own nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.documents import DocumentError
from cluster.tenants import KeyRing, Tenant
from deploy.config import ClusterConfig, Environment

SECRET_BYTES = 16
"""The least that keys the cache's namespaces."""


def file_faults(config: ClusterConfig, environment: Environment) -> list[str]:
    """A line for each file that cannot be used, with its key."""
    secrets = config.namespace_secret_file or (environment.namespace_secret_file,)
    return [
        f"{key}: {fault}"
        for key, name in (
            ("api_keys_file", config.api_keys_file),
            ("public_prompts_file", config.public_prompts_file),
            *(("namespace_secret_file", name) for name in secrets),
        )
        if name is not None
        for fault in _faults(key, name)
    ]


def _faults(key: str, name: str) -> Iterator[str]:
    try:
        content = Path(name).expanduser().read_bytes()
    except OSError as error:
        yield f"{name} cannot be read: {error.strerror}"
        return
    if not content:
        yield f"{name} is empty"
    elif key == "namespace_secret_file" and len(content) < SECRET_BYTES:
        yield f"{name} holds {len(content)} bytes; {SECRET_BYTES} random ones at least"
    elif key == "api_keys_file":
        try:
            KeyRing.read(content.decode("utf-8"), Tenant())
        except UnicodeDecodeError as error:
            yield f"{name}: not UTF-8 at byte {error.start}"
        except DocumentError as error:
            yield f"{name}: {error}"
