"""Whether a deployment goes on as another one: one coordinator for old and new replicas, so that no request is lost."""

from __future__ import annotations

import ray
from pydantic import ValidationError
from ray.exceptions import RayError

from cluster.coordination.cards import Identity, get_along
from cluster.coordination.revisions import Revision
from cluster.registry import CoordinatorMissing, find_coordinator
from cluster.settings import CoordinatorSettings
from deploy.changes import Reach, differences
from deploy.config import ClusterConfig

ANSWER_S = 10.0


def continued(settings: CoordinatorSettings, config: ClusterConfig) -> str | None:
    """The identity of the deployment that runs under this name, where `config`, whose coordinator is to get `settings`,
    can take its place group by group: same weights, and no key that takes a new cluster. None: begin anew."""
    try:
        running = find_coordinator(settings.service)
        identity: Identity = ray.get(running.identity.remote(), timeout=ANSWER_S)
        revision: Revision = ray.get(running.revision.remote("", -1), timeout=ANSWER_S)
        before = ClusterConfig.model_validate_json(revision.edition.source or "{}")
    except (CoordinatorMissing, RayError, TimeoutError, ValidationError):
        return None
    then, now = revision.edition.live.ingress, settings.settings.ingress
    same_weights = then is not None and now is not None and then.models == now.models
    fits = all(change.reach is not Reach.NEW for change in differences(before, config))
    return identity.config if same_weights and fits and get_along(identity.protocol, identity.oldest) else None
