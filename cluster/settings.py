"""What an ingress replica is told when it is built. Frozen, plain values.

Knows neither YAML nor environment variables: `deploy.config` makes one from the operator's config. No secret stands
here, only the name of the file that holds it: Serve shows application arguments to whoever asks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """One HTTP ingress replica.

    `model_dir` holds the tokenizer and its chat template. `model_names` are the names that clients may use, the
    canonical one first; `revision` identifies the weights and goes into every namespace. `service` names this
    deployment's actors. `secret_file` is the file whose bytes key the namespaces, the same on every replica; None: the
    coordinator draws one for its lifetime. `cache_scope` is "auto", "tenant" or "session". `body_limit` is in bytes,
    `max_model_len` in tokens (None: the model's own context). `drain_s`: how long running answers may take to end
    when the service stops.
    """

    model_dir: str
    model_names: tuple[str, ...]
    revision: str = ""
    service: str = "tidegate"
    secret_file: str | None = None
    cache_scope: str = "auto"
    session_ttl_s: float = 300.0
    body_limit: int = 8 * 1024 * 1024
    max_model_len: int | None = None
    drain_s: float = 30.0
