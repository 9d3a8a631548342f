"""What is applied to Kubernetes: every manifest against the schemas, its parts against each other and against us."""

from __future__ import annotations

import copy
import importlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.tenants import KeyRing, Tenant
from deploy.cluster import FAST
from deploy.files import SECRET_BYTES
from tests import manifests
from tests.manifests import FOLDERS, OVERLAYS, RAY_KINDS, Manifest, Service, gpus_of, pod_templates, ray_cluster, walk

ROOT = manifests.ROOT
RESTARTED = {"startupProbe", "livenessProbe", "readinessProbe"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Manifest]]:
    """The manifests of a folder of deploy/kuberay, each folder put together once."""
    tree, kept = manifests.copy_tree(tmp_path_factory.mktemp("kustomize")), {}

    def of(folder: str) -> list[Manifest]:
        if folder not in kept:
            kept[folder] = manifests.build(tree / folder)
        return copy.deepcopy(kept[folder])

    return of


Built = Callable[[str], list[Manifest]]


# -- schemas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_schemas_have_nothing_against_it(built: Built, folder: str) -> None:
    found = [fault for manifest in built(folder) for fault in manifests.faults(manifest)]
    assert not found


@pytest.mark.parametrize("kind", RAY_KINDS)
def test_the_ray_kinds_were_held_against_their_definitions(kind: str) -> None:
    if manifests.crd(kind) is None:
        pytest.skip("the definitions of the Ray kinds are not here")
    assert "spec" in manifests.crd(kind)["properties"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("RayService", lambda spec: spec.update(serveConfig="x"), "serveConfig: unknown key"),
        ("RayService", lambda spec: head(spec)["rayStartParams"].update({"num-cpus": 0}), "0 is not of type 'string'"),
        ("RayService", lambda spec: workers(spec).update(maxReplica=3), "maxReplica: unknown key"),
        ("RayService", lambda spec: workers(spec).pop("maxReplicas"), "'maxReplicas' is a required property"),
        ("RayService", lambda spec: container(spec).update(volumeMount=[]), "'volumeMount' was unexpected"),
        ("RayService", lambda spec: container(spec).update(env=[{"name": "A", "value": 1}]), "1 is not of type"),
        ("NetworkPolicy", lambda spec: spec.update(policyType=["Ingress"]), "'policyType' was unexpected"),
        ("PodDisruptionBudget", lambda spec: spec["selector"].update(labels={}), "'labels' was unexpected"),
    ],
)
def test_a_slip_of_the_pen_is_found(built: Built, kind: str, change: Callable[[Manifest], object], said: str) -> None:
    if kind in RAY_KINDS and manifests.crd(kind) is None:
        pytest.skip("the definitions of the Ray kinds are not here")
    manifest = next(one for one in built("overlays/cpu-demo") if one["kind"] == kind)
    change(manifest["spec"])
    assert any(said in fault for fault in manifests.faults(manifest))


def head(spec: Manifest) -> Manifest:
    return spec["rayClusterConfig"]["headGroupSpec"]  # type: ignore[no-any-return]


def workers(spec: Manifest) -> Manifest:
    return spec["rayClusterConfig"]["workerGroupSpecs"][0]  # type: ignore[no-any-return]


def container(spec: Manifest) -> Manifest:
    return workers(spec)["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def test_without_the_secrets_nothing_is_put_together(tmp_path: Path) -> None:
    """None ships with us: a secret that everybody knows would be worse than none."""
    tree = manifests.copy_tree(tmp_path, secrets=False)
    assert not [path for path in tree.rglob("*") if "secrets" in path.name]
    done = manifests.kustomize(tree / "overlays" / "cpu-demo")
    assert done.returncode and "secrets/" in done.stderr
    assert "secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


# -- the service -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_serve_and_we_take_the_embedded_config(built: Built, overlay: str) -> None:
    service = Service.of(built(f"overlays/{overlay}"))
    plain = yaml.safe_load(service.manifest["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(plain).applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert application.name == service.config.service_name and application.route_prefix == "/"
    assert service.config.api_keys_file, "Serve listens on every interface of its pod"
    assert service.config.namespace_secret_file, "ingresses on several nodes must agree on the namespaces"
    port = plain["http_options"]["port"]
    for group in service.workers:
        (one,) = group["template"]["spec"]["containers"]
        assert one["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": port}
        assert {"name": "serve", "containerPort": port} in one["ports"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_groups_find_room_in_the_workers_that_may_be(built: Built, overlay: str) -> None:
    service = Service.of(built(f"overlays/{overlay}"))
    sizes = [(group["maxReplicas"] * group.get("numOfHosts", 1), gpus_of(group)) for group in service.workers]
    assert service.gpus <= sum(pods * gpus for pods, gpus in sizes)
    if service.config.device == "cpu":
        assert not any(gpus for _, gpus in sizes)
        return
    for section in service.config.sections:
        per_group = section.tensor_parallel_size
        if section.placement == "node":
            fit = sum(pods * (gpus // per_group) for pods, gpus in sizes)
        else:
            fit = sum(pods * gpus for pods, gpus in sizes) // per_group
        assert section.groups <= fit, f"{section.names[0]}: {fit} groups fit"


@pytest.mark.parametrize(
    ("overlay", "across", "gpus"), [("cpu-demo", False, 0), ("one-gpu-node", False, 4), ("multi-node-tp8", True, 16)]
)
def test_an_overlay_is_what_its_name_says(built: Built, overlay: str, across: bool, gpus: int) -> None:
    service = Service.of(built(f"overlays/{overlay}"))
    (group,) = service.workers
    assert service.gpus == gpus
    assert (service.config.placement == "nodes") == across
    assert (service.config.tensor_parallel_size > gpus_of(group) > 0) == across


@pytest.mark.parametrize("folder", FOLDERS)
def test_worker_groups_have_both_bounds_and_ray_gets_words(built: Built, folder: str) -> None:
    for cluster in ray_clusters(built(folder)):
        groups = cluster.get("workerGroupSpecs", [])
        for group in groups:
            assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] < 1000
        for group in (cluster["headGroupSpec"], *groups):
            assert all(type(value) is str for value in group["rayStartParams"].values())
        assert cluster["rayVersion"].rsplit(".", 1)[0] in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert cluster["authOptions"]["mode"] == "token"


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "summarize"])
def test_the_cluster_grows_by_itself_and_its_head_does_no_work(built: Built, folder: str) -> None:
    (cluster,) = ray_clusters(built(folder))
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert all(template["spec"]["restartPolicy"] == "Never" for template in templates(built(folder), "ray-"))


def test_the_cluster_by_itself_is_the_services_but_for_its_readiness(built: Built) -> None:
    """Its workers are ready as soon as Ray runs on them: whether Serve does is nobody's business there."""
    (alone,) = ray_clusters(built("cluster"))
    assert "RayService" not in {manifest["kind"] for manifest in built("cluster")}
    (served,) = ray_clusters([one for one in built("overlays/cpu-demo") if one["kind"] == "RayService"])
    one, other = (cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0] for cluster in (alone, served))
    assert one.pop("readinessProbe")["httpGet"]["path"] == "/api/healthz"
    assert other.pop("readinessProbe")["httpGet"]["path"] == "/-/healthz"
    assert one.pop("image") == "tidegate:0.1.0-cpu" and other.pop("image") == "tidegate:0.1.0-demo"
    assert one == other


def ray_clusters(all_manifests: list[Manifest]) -> list[Manifest]:
    return [ray_cluster(manifest) for manifest in all_manifests if manifest["kind"] in RAY_KINDS]


def templates(all_manifests: list[Manifest], name: str = "") -> list[Manifest]:
    """Pod templates, those with a container whose name begins so."""
    every = [template for manifest in all_manifests for template in pod_templates(manifest)]
    return [one for one in every if any(each["name"].startswith(name) for each in one["spec"]["containers"])]


# -- references --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_everything_that_is_referred_to_is_there(built: Built, folder: str) -> None:
    """The job is applied beside a service."""
    applied = built(folder) + (built("overlays/cpu-demo") if folder == "summarize" else [])
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in applied}
    assert set(references(built(folder))) <= there
    assert {manifest["metadata"].get("namespace", "tidegate") for manifest in applied} == {"tidegate"}


def references(all_manifests: list[Manifest]) -> Iterator[tuple[str, str]]:
    for manifest in all_manifests:
        for kind, key, name in (
            ("Secret", "secret", "secretName"),
            ("Secret", "secretKeyRef", "name"),
            ("Secret", "secretRef", "name"),
            ("ConfigMap", "configMap", "name"),
            ("ConfigMap", "configMapKeyRef", "name"),
            ("ConfigMap", "configMapRef", "name"),
            ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
        ):
            yield from ((kind, found[name]) for found in walk(manifest, key) if isinstance(found, dict))
        yield from (("ServiceAccount", name) for name in walk(manifest, "serviceAccountName"))
        for address in walk(manifest, "redisAddress"):
            yield "Service", address.removeprefix("redis://").partition(":")[0]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_files_that_the_config_names_are_mounted_where_it_says(built: Built, overlay: str) -> None:
    applied = built(f"overlays/{overlay}")
    config = Service.of(applied).config
    data = {one["metadata"]["name"]: one["data"] for one in applied if one["kind"] == "Secret"}
    assert config.api_keys_file is not None
    for template in templates(applied, "ray-"):
        secrets = {one["name"]: one["secret"]["secretName"] for one in template["spec"]["volumes"] if "secret" in one}
        (container,) = template["spec"]["containers"]
        mounts = {one["mountPath"]: secrets[one["name"]] for one in container["volumeMounts"] if one["name"] in secrets}
        for file in (config.api_keys_file, *config.namespace_secret_file):
            folder, _, name = file.rpartition("/")
            assert name in data[mounts[folder]]


@pytest.mark.parametrize("overlay", ["one-gpu-node", "multi-node-tp8"])
def test_the_model_lies_on_a_volume_that_every_node_reads_under_one_path(built: Built, overlay: str) -> None:
    applied = built(f"overlays/{overlay}")
    for template in templates(applied, "ray-"):
        (container,) = template["spec"]["containers"]
        (mount,) = (one for one in container["volumeMounts"] if one["name"] == "models")
        assert Service.of(applied).config.model.startswith(f"{mount['mountPath']}/") and mount["readOnly"]
    (claim,) = (one for one in applied if one["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_secrets_are_ones_that_we_take() -> None:
    """Those of these tests, that is: so that what was put together above stands for what a person puts together."""
    assert KeyRing.read(manifests.SECRETS["base/secrets/tenants.yaml"], Tenant()).tenants
    assert len(manifests.SECRETS["base/secrets/namespace"]) >= SECRET_BYTES


# -- pods --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_pods_keep_to_the_restricted_profile(built: Built, folder: str) -> None:
    for template in templates(built(folder)):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert not any("hostPath" in volume for volume in pod.get("volumes", ()))
        for one in (*pod["containers"], *pod.get("initContainers", ())):
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for cluster in ray_clusters(built(folder)):
        if cluster.get("enableInTreeAutoscaling"):
            assert cluster["autoscalerOptions"]["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("folder", FOLDERS)
def test_containers_have_limits_and_images_that_stay_the_same(built: Built, folder: str) -> None:
    for template in templates(built(folder)):
        for one in template["spec"]["containers"]:
            assert {"cpu", "memory"} <= set(one["resources"]["limits"]) <= set(one["resources"]["requests"])
            assert one["resources"]["limits"]["memory"] == one["resources"]["requests"]["memory"]
            assert re.fullmatch(r"[a-z0-9-]+:\d+\.\d+\.\d+[a-z0-9.-]*", one["image"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_ray_pods_are_probed_and_told_what_our_own_ray_is_told(built: Built, folder: str) -> None:
    served = folder != "summarize"
    for template in templates(built(folder), "ray-"):
        for one in template["spec"]["containers"]:
            if one["name"] == "ray-job-submitter":
                continue
            assert set(one) >= RESTARTED
            told = {variable["name"]: variable.get("value") for variable in one["env"]}
            assert told["RAY_USAGE_STATS_ENABLED"] == "0" and told["HF_HUB_OFFLINE"] == "1"
            if served:
                assert told.items() >= FAST.items()
            assert {"name": "shared-memory", "mountPath": "/dev/shm"} in one["volumeMounts"]


def test_a_pod_gets_longer_to_end_than_its_answers(built: Built) -> None:
    for overlay in OVERLAYS:
        service = Service.of(built(f"overlays/{overlay}"))
        for group in service.workers:
            assert group["template"]["spec"]["terminationGracePeriodSeconds"] > service.config.drain_s


# -- selectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_finds_a_pod_and_every_pod_is_found(built: Built, overlay: str) -> None:
    applied = built(f"overlays/{overlay}")
    labels = [template["metadata"]["labels"] for template in templates(applied)]
    policies = [one for one in applied if one["kind"] == "NetworkPolicy"]
    for policy in policies:
        assert any(selects(policy["spec"]["podSelector"], each) for each in labels), policy["metadata"]["name"]
    closed = [one for one in policies if not one["spec"].get("ingress") and not one["spec"].get("egress")]
    assert [(one["spec"]["podSelector"], one["spec"]["policyTypes"]) for one in closed] == [({}, ["Ingress", "Egress"])]
    for budget in (one for one in applied if one["kind"] == "PodDisruptionBudget"):
        assert any(selects(budget["spec"]["selector"], each) for each in labels)
        assert type(budget["spec"]["minAvailable"]) is int and "maxUnavailable" not in budget["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_drained_machine_takes_no_more_than_one_worker(built: Built, overlay: str) -> None:
    applied = built(f"overlays/{overlay}")
    budgets = [one for one in applied if one["kind"] == "PodDisruptionBudget"]
    (budget,) = (one for one in budgets if one["metadata"]["name"] == "tidegate-worker")
    (group,) = Service.of(applied).workers
    assert budget["spec"]["minAvailable"] == max(1, group["minReplicas"] - 1)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_named_namespaces_come_in_and_only_to_named_ports(built: Built, overlay: str) -> None:
    """And nobody from here gets out of the cluster but the head, to Kubernetes itself."""
    for policy in (one for one in built(f"overlays/{overlay}") if one["kind"] == "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            for peer in rule["from"]:
                assert ("podSelector" in peer) != ("namespaceSelector" in peer)
                assert "podSelector" in peer or (rule["ports"] and peer["namespaceSelector"]["matchLabels"])
        for rule in policy["spec"].get("egress", ()):
            anywhere = "to" not in rule
            assert anywhere == (policy["metadata"]["name"] == "autoscaler")
            assert not anywhere or {port["port"] for port in rule["ports"]} == {443, 6443}


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


# -- faults and upgrades -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlay", "backend"), [("cpu-demo", None), ("one-gpu-node", "rocksdb"), ("multi-node-tp8", "redis")]
)
def test_rays_state_outlives_its_head(built: Built, overlay: str, backend: str | None) -> None:
    (cluster,) = ray_clusters(built(f"overlays/{overlay}"))
    options: dict[str, Any] = cluster.get("gcsFaultToleranceOptions", {})
    assert options.get("backend") == backend
    assert ("storage" in options) == (backend == "rocksdb") and ("redisPassword" in options) == (backend == "redis")


def test_the_upgrades_take_the_gpus_that_the_readme_says(built: Built, tmp_path: Path) -> None:
    """For two groups of eight ranks."""
    service = Service.of(built("overlays/multi-node-tp8"))
    groups, ranks = service.config.groups, service.config.tensor_parallel_size
    told = dict(re.findall(r"^\| `(upgrade-[a-z-]+)` \|.*\| (\d+) \|$", readme(), re.MULTILINE))
    tree = manifests.copy_tree(tmp_path)
    needed = {}
    for component in sorted((tree / "components").glob("upgrade-*")):
        kustomization = tree / "overlays" / "multi-node-tp8" / "kustomization.yaml"
        plain = (manifests.KUBERAY / "overlays" / "multi-node-tp8" / "kustomization.yaml").read_text(encoding="utf-8")
        kustomization.write_text(plain.replace("upgrade-incremental", component.name))
        strategy = Service.of(manifests.build(kustomization.parent)).manifest["spec"]["upgradeStrategy"]
        needed[component.name] = str((groups + more_groups(strategy, groups)) * ranks)
    assert len(needed) == 3 and told == needed


def more_groups(strategy: Manifest, groups: int) -> int:
    """Whole groups that stand beside the old ones at the most."""
    surge = {"None": 0, "NewCluster": 100}.get(strategy["type"])
    if surge is None:
        surge = strategy["clusterUpgradeOptions"]["maxSurgePercent"]
    return math.ceil(groups * surge / 100)


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")
