"""A program that deploys a service on a Ray that runs already, and answers every line it reads with the service's
status as a line of JSON: `python -m tests.ray.deployer ADDRESS alone|everywhere CONFIG`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

import deploy.app
from cluster.registry import CoordinatorMissing, find_coordinator
from deploy.config import ClusterConfig

ALONE, EVERYWHERE = "alone", "everywhere"
"""As `tidegate serve` does it, with what answers HTTP on the head alone; as KubeRay does, with a proxy on every node
that has a part of the service."""
SAYS = "deployer: "
"""What a line of its own begins with."""
HEAD = {"node:__internal_head__": 0.001}


def main() -> None:
    """Deploy, then answer."""
    address, how, plain = sys.argv[1:]
    config = ClusterConfig.model_validate(json.loads(plain))
    say(up=(deploy_alone if how == ALONE else deploy_everywhere)(address, config))
    for _ in sys.stdin:
        say(**status(config.service_name))


def status(service: str) -> dict[str, Any]:
    """What the coordinator says; of no group while there is none that answers."""
    try:
        found: dict[str, Any] = ray.get(find_coordinator(service).status.remote(), timeout=30)
    except (CoordinatorMissing, RayError) as error:
        return {"groups": [], "missing": str(error)}
    return found


def deploy_alone(address: str, config: ClusterConfig) -> str:
    build = deploy.app._ingresses

    def on_head(*arguments: Any) -> Any:
        """The streams of an ingress that goes with its host are lost; so it stays on the one that does not go."""
        return build(*arguments).options(ray_actor_options={"num_cpus": 0.01, "resources": HEAD})

    deploy.app._ingresses = on_head
    folders = [Path(section.model) for section in config.sections]
    return deploy.app.run(config, folders, lambda text: say(said=text), address=address).url


def deploy_everywhere(address: str, config: ClusterConfig) -> str:
    ray.init(address=address, log_to_driver=False)
    serve.start(proxy_location="EveryNode", http_options={"host": config.host, "port": config.port})
    serve.run(deploy.app.build(config), name=config.service_name, route_prefix="/")
    return f"http://{config.host}:{config.port}"


def say(**values: Any) -> None:
    """One line for whoever has started this."""
    print(SAYS + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
