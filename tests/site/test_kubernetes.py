"""The manifests of deploy/kubernetes, against the schemas of the Kubernetes API."""

import kubernetes_validate
import pytest
import yaml

from tests.site.test_production import COMMANDS, MIGRATE, PROJECT

FOLDER = PROJECT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
RESOURCES = {
    f"{resource['kind']} {resource['metadata']['name']}": resource
    for name in KUSTOMIZATION["resources"]
    for resource in yaml.safe_load_all((FOLDER / name).read_text())
}
DEPLOYMENTS = {one["metadata"]["name"]: one["spec"] for one in RESOURCES.values() if one["kind"] == "Deployment"}
JOB = RESOURCES["Job migrate"]["spec"]
PODS = {name: spec["template"] for name, spec in {**DEPLOYMENTS, "migrate": JOB}.items()}


def containers(pod):
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def command_of(name):
    [container] = PODS[name]["spec"]["containers"]
    return container.get("command")


def test_every_manifest_is_applied():
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(KUSTOMIZATION["resources"])


@pytest.mark.parametrize("name", RESOURCES)
def test_a_manifest_agrees_with_the_schema_of_the_kubernetes_api(name):
    kubernetes_validate.validate(RESOURCES[name], kubernetes_validate.latest_version(), strict=True)


def test_a_pod_runs_the_procfiles_command():
    assert command_of("web") is None  # the image's
    for name in DEPLOYMENTS.keys() - {"web"}:
        assert command_of(name) == COMMANDS[name]
    assert command_of("migrate") == MIGRATE
    assert DEPLOYMENTS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", PODS)
def test_a_pod_has_settings_from_the_secret_no_privileges_and_bounded_memory(name):
    pod = PODS[name]["spec"]
    [generated] = KUSTOMIZATION["secretGenerator"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["settings"]["secret"]["secretName"] == generated["name"]
    assert generated["files"] == [".env=guardian.env"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in containers(PODS[name]):
        assert "env" not in container
        assert container["image"] == KUSTOMIZATION["images"][0]["name"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert container["resources"]["limits"]["memory"]
        assert [(mount["mountPath"], mount["name"]) for mount in container["volumeMounts"]] == [
            ("/guardian/.env", "settings"), ("/var/lib/guardian", "var"), ("/tmp", "tmp"),
        ]  # fmt: skip


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_pod_waits_for_migrations_and_says_when_it_is_ready(name):
    [waiting] = PODS[name]["spec"]["initContainers"]
    assert waiting["command"] == ["python", "manage.py", "migrate", "--check"]
    assert PODS[name]["spec"]["containers"][0]["readinessProbe"]


def test_each_service_and_budget_selects_the_pods_of_a_deployment():
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}
    for resource in RESOURCES.values():
        name, spec = resource["metadata"]["name"], resource.get("spec", {})
        if resource["kind"] == "Service":
            assert spec["selector"] == labels[name]
        elif resource["kind"] in ("Deployment", "PodDisruptionBudget"):
            assert spec["selector"]["matchLabels"] == labels[name]


def test_a_disruption_leaves_a_pod_of_all_but_beat():
    budgets = {name.split()[1] for name in RESOURCES if name.startswith("PodDisruptionBudget ")}
    assert (
        budgets == {name for name, spec in DEPLOYMENTS.items() if spec["replicas"] > 1} == DEPLOYMENTS.keys() - {"beat"}
    )


def test_the_image_has_the_user_of_the_pods():
    [user] = {pod["spec"]["securityContext"]["runAsUser"] for pod in PODS.values()}
    assert f"useradd --system --uid {user} " in (PROJECT / "Dockerfile").read_text()
