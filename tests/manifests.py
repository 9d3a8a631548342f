"""What `kubectl apply -k` would send for the folders of deploy/kuberay, and what the schemas say to it."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster.tenants import hash_of
from deploy.config import ClusterConfig

ROOT = Path(__file__).resolve().parents[1]
KUBERAY = ROOT / "deploy" / "kuberay"
CRDS = ROOT.parent / "shared" / "data" / "kuberay-crds"
OVERLAYS = ("cpu-demo", "one-gpu-node", "multi-node-tp8")
FOLDERS = (*(f"overlays/{name}" for name in OVERLAYS), "cluster", "summarize")
SECRETS = {
    "base/secrets/tenants.yaml": f'tenants: [{{name: search, keys: ["{hash_of("a key that a test made")}"]}}]\n',
    "base/secrets/namespace": "thirty-two bytes that a test made",
    "components/redis/secrets/password": "a password that a test made",
    "summarize/secrets/key": "a key that a test made",
}
"""Files that are made by hand before anything is applied."""
KUBERNETES = ("1.31", "1.37")
"""Releases whose schemas must take the manifests."""
RAY_KINDS = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec", "RayCluster": ""}
"""Where each kind has its cluster's spec."""

Manifest = dict[str, Any]


def copy_tree(folder: Path, *, secrets: bool = True) -> Path:
    """deploy/kuberay in `folder`, without what somebody has made by hand here."""
    tree = shutil.copytree(KUBERAY, folder / "kuberay", ignore=shutil.ignore_patterns("secrets"))
    for name, content in SECRETS.items() if secrets else ():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(content)
    return tree


def kustomize(folder: Path) -> subprocess.CompletedProcess[str]:
    """`kustomize build`; skips the test where neither it nor kubectl is installed."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            return subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60)
    pytest.skip("neither kustomize nor kubectl is installed: overlays cannot be put together")


def build(folder: Path) -> list[Manifest]:
    """The manifests that come out of `folder`."""
    done = kustomize(folder)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@functools.cache
def crd(kind: str) -> dict[str, Any] | None:
    """The schema of ray.io/v1's `kind`; None where the definitions are not at hand."""
    path = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not path.exists():
        return None
    definition = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def faults(manifest: Manifest) -> list[str]:
    """What the schemas have against `manifest`: wrong values, missing ones, keys that nobody knows."""
    if manifest["kind"] not in RAY_KINDS:
        return _core_faults(manifest)
    found = [fault for template in pod_templates(manifest) for fault in _core_faults(_as_template(template))]
    schema = crd(manifest["kind"])
    if schema is not None:
        wrong = jsonschema.Draft7Validator(schema).iter_errors(manifest)
        found += [f"{error.json_path}: {error.message}" for error in wrong]
        found += unknown_keys(schema, manifest, manifest["kind"])
    return found


def unknown_keys(schema: dict[str, Any], value: object, at: str) -> Iterator[str]:
    """Keys of `value` that `schema` does not name: an API server drops them in silence."""
    if schema.get("x-kubernetes-preserve-unknown-fields") or (at.count(".") == 1 and at.endswith(".metadata")):
        return  # the top's metadata is Kubernetes' own
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_keys(schema.get("items", {}), item, f"{at}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            known = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if known is None:
                yield f"{at}.{key}: unknown key"
            elif isinstance(known, dict):
                yield from unknown_keys(known, item, f"{at}.{key}")


def _core_faults(manifest: Manifest) -> list[str]:
    return _faults_of(json.dumps(manifest, sort_keys=True))


@functools.cache
def _faults_of(text: str) -> list[str]:
    """Overlays have most of their manifests in common, and each look takes a tenth of a second."""
    manifest, found = json.loads(text), []
    for release in KUBERNETES:
        try:
            kubernetes_validate.validate(manifest, release, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{manifest['kind']} in {release}: {'.'.join(map(str, error.path))}: {error.message}")
    return found


def _as_template(template: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "one"}, "template": template}


def ray_cluster(manifest: Manifest) -> Manifest:
    """The cluster's spec in a manifest of one of RAY_KINDS."""
    place = RAY_KINDS[manifest["kind"]]
    cluster: Manifest = manifest["spec"][place] if place else manifest["spec"]
    return cluster


def pod_templates(manifest: Manifest) -> list[Manifest]:
    """Templates of all pods that `manifest` brings about, the head's first."""
    if manifest["kind"] not in RAY_KINDS:
        template = manifest.get("spec", {}).get("template")
        return [template] if template else []
    cluster = ray_cluster(manifest)
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())]
    submitter = manifest["spec"].get("submitterPodTemplate")
    return [*(group["template"] for group in groups), *([submitter] if submitter else [])]


def walk(value: object, key: str) -> Iterator[Any]:
    """Every value that stands under `key`, wherever in `value`."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name == key:
                yield item
            yield from walk(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item, key)


@dataclass(frozen=True)
class Service:
    """A RayService as it matters for sizes: `config` is ours, out of its serveConfigV2."""

    manifest: Manifest
    config: ClusterConfig

    @classmethod
    def of(cls, manifests: list[Manifest]) -> Service:
        (manifest,) = (one for one in manifests if one["kind"] == "RayService")
        (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
        return cls(manifest, ClusterConfig.model_validate(application["args"]))

    @property
    def workers(self) -> list[Manifest]:
        groups: list[Manifest] = ray_cluster(self.manifest)["workerGroupSpecs"]
        return groups

    @property
    def gpus(self) -> int:
        """What the groups of all models ask for."""
        return self.config.ranks if self.config.device == "cuda" else 0


def gpus_of(group: Manifest) -> int:
    """GPUs of one pod of a worker group."""
    (container,) = group["template"]["spec"]["containers"]
    return int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
