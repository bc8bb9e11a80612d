"""The Helm chart: rendered by Helm's own library, valid for Kubernetes, whole, and shut in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from deploy import generate
from docs import generate as docs_generate
from tests import deploy_files as files
from tests.cases import every_case
from tests.deploy_files import CHART, DEPLOY, FORMS
from triton_openai.access.keys import read_keys
from triton_openai.config.options import options
from triton_openai.config.tree import AccessSettings
from triton_openai.telemetry.vllm_names import RENAMED, SCRAPED_RENAMED

VALUES: dict[str, Any] = files.load(CHART / "values.yaml")
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in sorted((CHART / "templates").rglob("*.*"))}
# The oldest that the chart allows, and the newest that the schemas know.
_OLDEST = re.search(r"1\.\d+", files.load(CHART / "Chart.yaml")["kubeVersion"])[0]  # type: ignore[index]
KUBERNETES = [pytest.param(_OLDEST, marks=pytest.mark.extended), "latest"]
# The least that this mode needs.
SIDECAR = {"mode": "sidecar", "triton": {"modelRepository": {"volume": {"hostPath": {"path": "/models"}}}}}
# Kinds that Kubernetes itself does not know; what pods they have inside is checked as a pod.
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "ServingRuntime", "InferenceService"}


CRDS: dict[str, Any] = json.loads((files.ROOT / "tests/fixtures/gateway_crds.json").read_text(encoding="utf-8"))


def closed(schema: Any) -> Any:
    """Return *schema* without room for fields that it does not name; that of metadata names none."""
    if not isinstance(schema, dict):
        return [closed(one) for one in schema] if isinstance(schema, list) else schema
    made = {name: closed(one) for name, one in schema.items()}
    return {"additionalProperties": False, **made} if isinstance(made.get("properties"), dict) else made


def valid(manifest: Mapping[str, Any], version: str) -> None:
    """Assert that Kubernetes of *version*, or the custom resource's definition, knows every field of *manifest*."""
    validate = pytest.importorskip("kubernetes_validate")
    schema = CRDS.get(f"{manifest['apiVersion']}/{manifest['kind']}")
    if schema is not None:
        jsonschema_rs.validate(closed(schema), manifest)
    elif manifest["kind"] not in CUSTOM:
        validate.validate(manifest, validate.latest_version() if version == "latest" else version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("form", FORMS)
def test_manifests_are_valid(form: str, version: str) -> None:
    """Every field of what the chart makes is known to Kubernetes."""
    manifests = files.chart_documents(form)

    assert {"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget"} <= {one["kind"] for one in manifests}
    for manifest in manifests:
        valid(manifest, version)


@pytest.mark.parametrize("version", KUBERNETES)
def test_other_manifests_are_valid(version: str) -> None:
    """What stands beside the chart is valid too; of KServe's kinds, the pod that they describe."""
    for form in generate.FORMS:
        for manifest in files.plain_documents(form):
            valid(manifest, version)
    spec = files.load(DEPLOY / "kserve/serving-runtime.yaml")["spec"]
    pod = {key: spec[key] for key in ("containers", "volumes")}
    assert {*pod, "annotations", "supportedModelFormats"} == set(spec)
    valid({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "runtime"}, "spec": pod}, version)


def test_a_mistake_is_noticed() -> None:
    """The schemas are strict: a field that Kubernetes does not know fails."""
    manifest = files.only(files.plain_documents("standalone"), "Deployment")
    manifest["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    pool = files.only(inference_pool(), "InferencePool")
    pool["spec"]["endpointPickerRef"]["ports"] = []

    for one, field in ((manifest, "livenesProbe"), (pool, "ports")):
        with pytest.raises(Exception, match=field):
            valid(one, "latest")


def inference_pool() -> list[Any]:
    """Return what `deploy/` has for a gateway."""
    return files.documents((DEPLOY / "kubernetes/inference-pool.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("version", KUBERNETES)
def test_a_gateway_finds_the_pods(version: str) -> None:
    """The pool selects the pods of the guide, and the picker knows their label and reads metrics that there are."""
    manifests = inference_pool()
    for manifest in manifests:
        valid(manifest, version)
    pool, route, picker = (files.only(manifests, kind) for kind in ("InferencePool", "HTTPRoute", "Deployment"))
    guide = (files.ROOT / "docs/guides/kubernetes-gateway.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```yml\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    made = files.render(yaml.safe_load(block), name="triton-openai")
    pods = files.only([one for path, text in made.items() if path.endswith(".yaml") for one in files.documents(text)],
                      "Deployment")["spec"]["template"]  # fmt: skip
    labels = pods["metadata"]["labels"]
    spec = pool["spec"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    served = [port["containerPort"] for port in files.service_container(pods["spec"])["ports"]]
    assert [port["number"] for port in spec["targetPorts"]] == served
    assert pool["metadata"]["name"] == route["spec"]["rules"][0]["backendRefs"][0]["name"]
    service = files.only(manifests, "Service")
    reference = spec["endpointPickerRef"]
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == (
        reference["name"],
        reference["port"]["number"],
    )
    assert service["spec"]["selector"] == picker["spec"]["template"]["metadata"]["labels"]
    container = picker["spec"]["template"]["spec"]["containers"][0]
    assert f"--pool-name={pool['metadata']['name']}" in container["args"]

    config = yaml.safe_load(files.only(manifests, "ConfigMap")["data"]["config.yaml"])
    assert {"apiVersion", "kind", "plugins", "schedulingProfiles"} == config.keys()
    plugins = {plugin["type"]: plugin.get("parameters") for plugin in config["plugins"]}
    assert {one["pluginRef"] for one in config["schedulingProfiles"][0]["plugins"]} <= plugins.keys()
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    assert engine.pop("name") == labels["llm-d.ai/engine-type"]
    exported = {*RENAMED, *(one.name for one in SCRAPED_RENAMED)}
    assert {"queuedRequestsSpec", "runningRequestsSpec", "loraSpec"} == engine.keys()
    assert set(engine.values()) <= exported
    objectives = [one["metadata"]["name"] for one in manifests if one["kind"] == "InferenceObjective"]
    assert all(f"{name}: " in guide for name in objectives)


def test_plain_manifests_are_current() -> None:
    """`deploy/kubernetes` is what `python deploy/generate.py` writes."""
    for form in generate.FORMS:
        made = files.render(generate.values_of(form), name="triton-openai", namespace="default")

        assert generate.plain(form, made) == (DEPLOY / "kubernetes" / f"{form}.yaml").read_text(encoding="utf-8")


def pods(form: str) -> list[Any]:
    """Return the pods among the chart's manifests, Deployments' included."""
    manifests = files.chart_documents(form)
    return [one["spec"] for one in manifests if one["kind"] == "Pod"] + [
        one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "Deployment"
    ]


@pytest.mark.parametrize("form", FORMS)
def test_pods_are_shut_in(form: str) -> None:
    """No container runs as root, gains rights, or has capabilities; ours cannot write outside its volumes."""
    for pod in pods(form):
        assert pod["automountServiceAccountToken"] is False
        assert {"type": "RuntimeDefault"} == pod["securityContext"]["seccompProfile"]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            context = container["securityContext"]
            assert context["runAsNonRoot"]
            assert context["runAsUser"] > 0
            assert context["allowPrivilegeEscalation"] is False
            assert ["ALL"] == context["capabilities"]["drop"]
            assert context.get("readOnlyRootFilesystem") or container["name"] == "triton"
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            volumes = {one["name"] for one in pod.get("volumes", ())}
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes


@pytest.mark.parametrize("form", FORMS)
def test_parts_fit_together(form: str) -> None:
    """Selectors find the pods and not those of `helm test`, and what scales or protects names the Deployment."""
    manifests = files.chart_documents(form)
    deployment = files.only(manifests, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    service = files.only(manifests, "Service")
    selectors = [deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in manifests if one["kind"] == "PodDisruptionBudget"]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in manifests if one["kind"] == "NetworkPolicy"]
    for constraint in deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]:
        selectors.append(constraint["labelSelector"]["matchLabels"])
    test = files.only(manifests, "Pod")["metadata"]["labels"]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= test.items()
    for monitor in (one for one in manifests if one["kind"] == "ServiceMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        known = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= known
    scalers = [one for one in manifests if one["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]
    assert ("replicas" not in deployment["spec"]) == (len(scalers) == 1)
    for scaler in scalers:
        assert deployment["metadata"]["name"] == scaler["spec"]["scaleTargetRef"]["name"]
    ports = {port[key] for port in service["spec"]["ports"] for key in ("name", "port")}
    for backend in backends(manifests):
        assert service["metadata"]["name"] == backend["name"]
        assert backend["port"] in ports


def backends(manifests: list[Any]) -> list[dict[str, Any]]:
    """Return the name and the port of the Services that Ingresses and HTTPRoutes lead to."""
    found = []
    for rule in (rule for one in manifests for rule in one.get("spec", {}).get("rules", ())):
        services = [path["backend"]["service"] for path in rule.get("http", {}).get("paths", ())]
        found += [{"name": one["name"], "port": one["port"]["name"]} for one in services]
        found += rule.get("backendRefs", ())
    return found


def test_what_is_off_by_default() -> None:
    """Without values there are a Deployment, a Service, an account, a disruption budget and the pod of `helm test`."""
    made = files.render({})
    kinds = [one["kind"] for path, text in made.items() if path.endswith(".yaml") for one in files.documents(text)]

    assert ["Deployment", "Pod", "PodDisruptionBudget", "Service", "ServiceAccount"] == sorted(kinds)


def test_the_api_is_opened_to_the_outside() -> None:
    """The chart opens the API by an Ingress or an HTTPRoute, and neither metrics, health nor Triton's protocol."""
    ingress = files.only(files.chart_documents("everything"), "Ingress")["spec"]
    route = files.only(files.chart_documents("alternatives"), "HTTPRoute")["spec"]

    assert [{"path": "/v1", "pathType": "Prefix"}] == [
        {key: path[key] for key in ("path", "pathType")} for rule in ingress["rules"] for path in rule["http"]["paths"]
    ]
    assert [[{"path": {"type": "PathPrefix", "value": "/v1"}}]] == [rule["matches"] for rule in route["rules"]]
    assert 1 == len(backends([{"spec": ingress}])) == len(backends([{"spec": route}]))
    assert {"request": "0s"} == route["rules"][0]["timeouts"]
    assert 30900 == files.only(files.chart_documents("alternatives"), "Service")["spec"]["ports"][0]["nodePort"]


def test_alerts_and_dashboard_arrive_as_they_are() -> None:
    """The operator and Grafana get the files of this repository, with the labels by which they find them."""
    manifests = files.chart_documents("everything")
    rule = files.only(manifests, "PrometheusRule")
    (dashboard,) = [one for one in manifests if one["metadata"]["name"] == "llm-dashboard"]
    (text,) = dashboard["data"].values()

    assert files.load(DEPLOY / "prometheus/alerts.yaml") == rule["spec"]
    assert "prometheus" == rule["metadata"]["labels"]["release"]
    assert json.loads((DEPLOY / "grafana/triton-openai.json").read_text(encoding="utf-8")) == json.loads(text)
    assert "1" == dashboard["metadata"]["labels"]["grafana_dashboard"]


def test_keda_asks_what_its_own_manifest_asks() -> None:
    """The chart's ScaledObject counts the requests of its own pods, and is as `deploy/kubernetes/keda.yaml`."""
    scaler = files.only(files.chart_documents("alternatives"), "ScaledObject")["spec"]
    plain = files.load(DEPLOY / "kubernetes/keda.yaml")["spec"]
    own = 'namespace="prod",pod=~"demo-triton-openai-[^-]+-[^-]+"'
    requests, cpu = scaler["triggers"]

    assert 2 == requests["metadata"]["query"].count(own)
    assert plain["triggers"][0]["metadata"]["query"] == requests["metadata"]["query"].replace(
        own, 'namespace="default"'
    )
    assert scaler.keys() == plain.keys()
    assert plain["advanced"] == scaler["advanced"]
    assert {"authModes": "bearer"}.items() <= requests["metadata"].items()
    assert {"name": "prometheus"} == requests["authenticationRef"]
    assert {"containerName": "triton-openai", "value": "80"} == cpu["metadata"]


def test_common_labels() -> None:
    """Every object and pod has them, and no selector, because selectors cannot change."""
    manifests = files.chart_documents("everything")
    deployment = files.only(manifests, "Deployment")["spec"]
    label = {"example.com/cost-center": "inference"}

    for labels in (*(one["metadata"]["labels"] for one in manifests), deployment["template"]["metadata"]["labels"]):
        assert label.items() <= labels.items()
    assert not label.items() <= deployment["selector"]["matchLabels"].items()
    assert {"team": "llm"}.items() <= deployment["template"]["metadata"]["labels"].items()


def test_containers_around_the_service() -> None:
    """Init containers run before Triton, for which they may fetch models; further containers run beside the service."""
    pod = files.only(files.chart_documents("everything"), "Deployment")["spec"]["template"]["spec"]

    assert ["prepare", "triton"] == [one["name"] for one in pod["initContainers"]]
    assert ["triton-openai", "proxy"] == [one["name"] for one in pod["containers"]]


def test_models_from_an_object_store() -> None:
    """Triton reads the bucket itself; there is no volume, and the service looks for no files."""
    made = files.render({"mode": "sidecar", "triton": {"modelRepository": {"url": "s3://models/production"}}})
    (deployment,) = files.documents(made["templates/deployment.yaml"])
    pod = deployment["spec"]["template"]["spec"]
    (triton,), service = pod["initContainers"], files.service_container(pod)

    assert "--model-repository=s3://models/production" in triton["args"]
    mounts = [mount["name"] for container in (triton, service) for mount in container["volumeMounts"]]
    assert "models" not in {*mounts, *(volume["name"] for volume in pod["volumes"])}
    assert "TRITON_OPENAI_TRITON_REPOSITORY" not in {one["name"] for one in service["env"]}


def test_triton_is_reached_through_the_service_alone() -> None:
    """In sidecar mode Triton's API is on the pod's loopback, since whoever reaches it needs no key; metrics are not."""
    manifests = files.chart_documents("sidecar")
    (triton,) = files.only(manifests, "Deployment")["spec"]["template"]["spec"]["initContainers"]
    flags = dict(one.removeprefix("--").split("=", 1) for one in triton["args"][1:])

    assert ("127.0.0.1", "127.0.0.1") == (flags["http-address"], flags["grpc-address"])
    assert "0.0.0.0" == flags["metrics-address"]
    assert [int(flags["metrics-port"])] == [port["containerPort"] for port in triton["ports"]]
    # Kubernetes asks from outside of the pod.
    for probe in ("startupProbe", "livenessProbe"):
        assert {"path": "/metrics", "port": triton["ports"][0]["name"]} == triton[probe]["httpGet"]
    assert {9000, int(flags["metrics-port"])} == {
        port["targetPort"] for port in files.only(manifests, "Service")["spec"]["ports"]
    }


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_metrics_of_triton_stay_in_the_cluster(kind: str) -> None:
    """
    Triton's metrics ask for no key: where the Service is open to the outside, they have one of their own, which is
    not.
    """
    made = files.render({**SIDECAR, "service": {"type": kind, "annotations": {"example.com/public": "yes"}}})
    services = files.documents(made["templates/service.yaml"])

    assert [(kind, ["http"]), ("ClusterIP", ["triton-metrics"])] == [
        (one["spec"]["type"], [port["name"] for port in one["spec"]["ports"]]) for one in services
    ]
    assert services[0]["metadata"]["name"] != services[1]["metadata"]["name"]
    # The ServiceMonitor finds both.
    assert services[0]["metadata"]["labels"] == services[1]["metadata"]["labels"]
    assert services[0]["spec"]["selector"] == services[1]["spec"]["selector"]
    assert "annotations" not in services[1]["metadata"]
    for one in services:
        valid(one, "latest")


def test_clients_of_triton_itself() -> None:
    """
    Clients of Triton itself reach the Triton beside the service if they are to: at the Service, the container and
    through the policy.
    """
    for enabled in (False, True):
        values = {"kserve": {"enabled": enabled}, "networkPolicy": {"enabled": True}}
        manifests = [
            one
            for path, text in files.render({**files.load(CHART / "ci" / "sidecar-values.yaml"), **values}).items()
            if path.endswith(".yaml")
            for one in files.documents(text)
        ]
        (triton,) = files.only(manifests, "Deployment")["spec"]["template"]["spec"]["initContainers"]
        opened = {port["name"]: port["containerPort"] for port in triton["ports"]}
        policy = files.only(manifests, "NetworkPolicy")["spec"]
        (service,) = [one for one in manifests if one["kind"] == "Service"]
        ports = {port["name"]: (port["port"], port["targetPort"]) for port in service["spec"]["ports"]}

        address = "0.0.0.0" if enabled else "127.0.0.1"
        assert {f"--http-address={address}", f"--grpc-address={address}"} <= set(triton["args"])
        own = {"http-kserve": 8000, "grpc-kserve": 8001} if enabled else {}
        assert {**own, "triton-metrics": 8002} == opened
        assert {9000, *own.values()} == {port["port"] for port in policy["ingress"][0]["ports"]}
        assert {name: (port, name) for name, port in own.items()}.items() <= ports.items()
        assert bool(own) == ("http-kserve" in ports)


@pytest.mark.parametrize(
    "urls, ports",
    [
        (["http://triton:8000"], [8000]),
        (["grpc://triton:9001", "http://[fd00::1]:9000"], [9001, 9000]),
        (["https://triton.example.com"], [443]),
    ],
)
def test_the_network_policy_lets_out_to_triton(urls: list[str], ports: list[int]) -> None:
    """The network policy opens the ports of Triton's addresses, unless others are named."""

    def allowed(**policy: Any) -> list[int]:
        values = {"triton": {"urls": urls}, "networkPolicy": {"enabled": True, **policy}}
        (made,) = files.documents(files.render(values)["templates/networkpolicy.yaml"])
        return [port["port"] for port in made["spec"]["egress"][1]["ports"]]

    assert ports == allowed()
    assert [18000] == allowed(tritonPorts=[18000])


def test_several_tritons_take_the_place_of_one() -> None:
    """Those of the settings are the service's; one address beside them would be an error, and a sidecar has its own."""
    endpoints = ["a=http://a:8000+grpc://a:8001", {"name": "b", "url": ["https://b"], "dns": True}]
    settings = {"triton": {"endpoints": endpoints}}
    made = files.render({"settings": settings, "networkPolicy": {"enabled": True}})
    (deployment,) = files.documents(made["templates/deployment.yaml"])
    container = files.service_container(deployment["spec"]["template"]["spec"])
    assert "TRITON_OPENAI_TRITON_URL" not in {one["name"] for one in container["env"]}
    (policy,) = files.documents(made["templates/networkpolicy.yaml"])
    assert [8000, 8001, 443] == [port["port"] for port in policy["spec"]["egress"][1]["ports"]]
    with pytest.raises(ValueError, match="needs mode standalone"):
        files.render({"mode": "sidecar", "settings": settings, "triton": {"modelRepository": {"url": "s3://b/m"}}})


def test_pods_stay_when_only_the_chart_changes() -> None:
    """Nothing of the chart's own version is in the pods: replacing one with a Triton loads its models again."""
    metadata = files.only(files.chart_documents("sidecar"), "Deployment")["spec"]["template"]["metadata"]

    assert {"app.kubernetes.io/name", "app.kubernetes.io/instance"} == set(metadata["labels"])


def test_the_cache_can_be_a_claim() -> None:
    """A volume that is named takes the place of the empty folder, which Helm would otherwise put beside it."""
    spec = files.only(files.chart_documents("alternatives"), "Deployment")["spec"]["template"]["spec"]
    (cache,) = [volume for volume in spec["volumes"] if volume["name"] == "cache"]

    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "tokenizers"}} == cache


def test_what_is_kept_has_a_volume() -> None:
    """Files, batches and responses are in a claim of one pod, which the release leaves behind."""
    manifests = files.chart_documents("persistence")
    claim, spec = files.only(manifests, "PersistentVolumeClaim"), files.only(manifests, "Deployment")["spec"]
    pod = spec["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "state"]
    service = files.service_container(pod)
    (mount,) = [one for one in service["volumeMounts"] if one["name"] == "state"]

    assert claim["metadata"]["name"] == volume["persistentVolumeClaim"]["claimName"]
    assert {"helm.sh/resource-policy": "keep", "example.com/backup": "yes"} == claim["metadata"]["annotations"]
    assert ("50Gi", "fast-local") == (
        claim["spec"]["resources"]["requests"]["storage"],
        claim["spec"]["storageClassName"],
    )
    assert mount["mountPath"] in [one["value"] for one in service["env"] if one["name"] == "XDG_STATE_HOME"]
    # Two pods would have the same database, on different machines.
    assert (1, {"type": "Recreate"}) == (spec["replicas"], spec["strategy"])
    own = {"replicaCount": 1, "persistence": {"enabled": True, "existingClaim": "mine"}}
    made = files.render(own)
    assert not made["templates/persistentvolumeclaim.yaml"].strip()
    assert "claimName: mine" in made["templates/deployment.yaml"]
    for more in ({"replicaCount": 2}, {"autoscaling": {"enabled": True}}):
        with pytest.raises(ValueError, match="persistence needs replicaCount 1"):
            files.render({**own, **more})


def test_replicas_share_what_is_kept() -> None:
    """With PostgreSQL and a bucket replicas need no claim, and they can share no folder."""
    manifests = files.chart_documents("replicas")
    spec = files.only(manifests, "Deployment")["spec"]
    pod = spec["template"]["spec"]
    service = files.service_container(pod)
    environ = {one["name"]: one.get("value", one.get("valueFrom")) for one in service["env"]}
    secret = {"secretKeyRef": {"name": "llm-database", "key": "url"}}

    assert "PersistentVolumeClaim" not in {one["kind"] for one in manifests}
    assert (3, "RollingUpdate") == (spec["replicas"], spec["strategy"]["type"])
    assert {"name": "state", "emptyDir": {}} in pod["volumes"]
    assert {"name": "state", "mountPath": environ["XDG_STATE_HOME"]} in service["volumeMounts"]
    assert [secret] * 2 == [environ[f"TRITON_OPENAI_{name}_STORE"] for name in ("BATCHES", "RESPONSES")]
    assert "TRITON_OPENAI_FILES_STORE" not in environ
    # One pod, whose files are in a bucket and whose tables are on a volume.
    bucket = {"settings": {"files": {"store": "s3://b"}}}
    files.render({**bucket, "replicaCount": 1, "persistence": {"enabled": True}})
    postgresql: dict[str, Any] = {"persistence": {"postgresql": {"existingSecret": "db"}}}
    made = files.render({**postgresql, "settings": {"files": {"store": "s3://b"}, "responses": {"store": "memory"}}})
    assert "TRITON_OPENAI_RESPONSES_STORE" not in made["templates/deployment.yaml"]
    shared = {"enabled": True, "accessModes": ["ReadWriteMany"], "postgresql": {"existingSecret": "db"}}
    mount = {"extraVolumeMounts": [{"name": "shared", "mountPath": "/mnt/shared"}]}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**postgresql}, "replicas share files in a bucket"),
        ({**postgresql, **mount, "settings": {"files": {"store": "dir:/mnt/shared"}}}, "share files in a bucket"),
        ({"persistence": shared}, "replicas share files in a bucket"),
        ({**bucket, "persistence": shared, "replicaCount": 2}, "replicas share no volume"),
        ({**bucket, "persistence": {"enabled": True}}, "persistence needs replicaCount 1"),
        ({**bucket, "replicaCount": 1}, "would be lost with the pod"),
        ({**postgresql, "settings": {"batches": {"store": "postgresql://me:secret@db/x"}}}, "name a Secret in"),
    ]
    for values, words in wrong:
        with pytest.raises(ValueError, match=words):
            files.render(values)


def test_triton_ends_after_the_service() -> None:
    """In sidecar mode Triton is a container that Kubernetes ends last, within the time that the pod has."""
    spec = files.only(files.chart_documents("sidecar"), "Deployment")["spec"]["template"]["spec"]
    (triton,) = spec["initContainers"]
    values = VALUES["shutdown"]

    assert "Always" == triton["restartPolicy"]
    assert f"--exit-timeout-secs={values['tritonSeconds']}" in triton["args"]
    assert sum(values.values()) + 10 <= spec["terminationGracePeriodSeconds"]


def test_every_template_is_used() -> None:
    """The files of values together make something of each template."""
    made = {path.rpartition("/")[2] for form in FORMS for path, text in files.rendered(form).items() if text.strip()}

    assert {name for name in TEMPLATES if not name.startswith("_")} == made


def test_the_schema_of_settings_is_current() -> None:
    """The schema follows from the types of the settings: `python docs/generate.py` writes it."""
    text = docs_generate.VALUES_SCHEMA.read_text(encoding="utf-8")

    assert docs_generate.values_schema(text) == text


def test_the_schema_takes_what_the_service_takes() -> None:
    """
    The schema has every setting of the reference; one text may stand for a list of texts, as in the service's own
    file.
    """
    model = {
        "aliases": "gpt-4o-mini",
        "loras": ["a", {"name": "b", "task_id": 3, "path": "/b"}],
        "default_parameters": {"temperature": 0, "stop": ["x"]},
    }
    settings = {
        "server": {"workers": 2},
        "triton": {"request_timeout": 60, "load_model": "*"},
        "triton_access": {"headers": ["x-tenant: a"]},
        "access": {"cors_allow_origin": "https://chat.example.com", "gateway": {"objectives": {"batch": 2}}},
        "models": {"m": model},
    }
    files.render({"settings": settings})
    types = SCHEMA["definitions"]
    groups = {name: made.get("$ref", "").rpartition("/")[2] for name, made in types["Settings"]["properties"].items()}
    described = {(group, name) for group, kind in groups.items() if kind for name in types[kind]["properties"]}

    assert {option.path for option in options() if option.section != "models"} == described - {
        ("access", "gateway"),
        ("defaults", "default_parameters"),
        *(("triton", name) for name in ("routing", "failover", "ejection")),
    }


def _keys(values: Mapping[str, Any], at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found = set()
    for key, value in values.items():
        found.add((*at, key))
        if isinstance(value, dict):
            found |= _keys(value, (*at, key))
    return found


def test_values_that_templates_use_exist() -> None:
    """A misspelt `.Values.x` would be empty and nothing else."""
    known = _keys(VALUES)
    for name, text in TEMPLATES.items():
        for path in re.findall(r"\.Values\.([\w.]+)", text):
            assert tuple(path.split(".")) in known, f"{name}: {path}"


def test_the_schema_has_every_value() -> None:
    """Each value has its place in the schema, and each place a value; what is misspelt is refused everywhere."""

    def places(schema: Mapping[str, Any], at: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        found = set()
        for key, inner in schema.get("properties", {}).items():
            found |= {(*at, key), *places(inner, (*at, key))}
        assert not schema.get("properties") or schema["additionalProperties"] is False, at
        return found

    declared = places(SCHEMA)
    free = {at for at in _keys(VALUES) if at[:-1] and any(at[:n] in declared for n in range(1, len(at)))} - declared
    # Below a value that may hold anything.
    for at in free:
        parent = next(at[:n] for n in range(len(at) - 1, 0, -1) if at[:n] in declared)
        node: Any = SCHEMA
        for key in parent:
            node = node["properties"][key]
        assert {"type": "object"} == node, at
    assert declared - _keys(VALUES) == {
        ("global",),
        *(
            ("probes", probe, key)
            for probe in ("liveness", "readiness")
            for key in ("initialDelaySeconds", "successThreshold")
        ),
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 3}, "replicas"),
    ({"mode": "daemon"}, "mode"),
    ({"mode": "sidecar"}, "volume"),
    ({"triton": {"urls": ["triton:8000"]}}, "urls"),
    ({"image": {"digest": "latest"}}, "digest"),
    ({"autoscaling": {"enabled": True, "requestsInFlight": None}}, "requestsInFlight"),
    ({"tls": {"clientCertificates": True}}, "tls.existingSecret"),
    ({"tracing": {"otlpEndpoint": "collector:4317"}}, "otlpEndpoint"),
    ({"podDisruptionBudget": {"maxUnavailable": "half"}}, "maxUnavailable"),
    ({"mode": "sidecar", "triton": {"modelRepository": {"url": "http://models"}}}, "url"),
    ({"tracing": {"tritonEndpoint": "http://collector:4318/v1/traces"}}, "tritonEndpoint needs mode sidecar"),
    ({"service": {"nodePort": 30900}}, "service.nodePort needs service.type"),
    ({"ingress": {"enabled": True}}, "ingress needs hosts"),
    ({"httpRoute": {"enabled": True}}, "parentRefs"),
    ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name"),
    # Settings that do not exist, and those that the chart sets.
    ({"settings": {"sever": {"workers": 2}}}, "sever"),
    ({"settings": {"server": {"workers": "two"}}}, "/settings/server/workers"),
    ({"settings": {"models": {"m": {"tokeniser": "x"}}}}, "/settings/models/m.*tokeniser"),
    ({"settings": {"server": {"port": 80}}}, "settings.server.port is not accepted"),
    ({"settings": {"triton": {"url": "http://triton:8000"}}}, "set triton.urls"),
    # The probes would not use HTTPS.
    ({"settings": {"tls": {"certificate": "/etc/tls/tls.crt"}}}, "tls.existingSecret"),
    # A ConfigMap is no place for secrets.
    ({"settings": {"access": {"api_key": ["k"]}}}, "the Secret that apiKeys.existingSecret names"),
    ({"settings": {"access": {"openai_restricted_api": []}}}, "from a Secret in extraEnvFrom"),
    ({"settings": {"triton_access": {"headers": "Authorization: Bearer t"}}}, "a Secret in triton.token"),
    # Prometheus would be turned away for ever.
    ({"serviceMonitor": {"enabled": True}, "apiKeys": {"existingSecret": "keys"}}, "endpoint.authorization"),
    ({"serviceMonitor": {"enabled": True}, "tls": {"existingSecret": "tls"}}, "endpoint.tlsConfig"),
    ({**SIDECAR, "serviceMonitor": {"enabled": True}, "networkPolicy": {"enabled": True}}, "tritonMetricsClients"),
]


def test_wrong_values_are_refused() -> None:
    """Wrong values are named, instead of making manifests that do something else."""
    answers = files.render_all([values for values, _ in WRONG])
    said = [one.get("error", "rendered") for one in answers]

    assert [] == [
        (complaint, error) for (_, complaint), error in zip(WRONG, said, strict=True) if not re.search(complaint, error)
    ]


def test_notes_say_who_can_reach_it() -> None:
    """A network policy that names no clients lets everybody in, as none does."""

    def told(**policy: Any) -> bool:
        return "Everybody" in files.render({"networkPolicy": policy})["templates/NOTES.txt"]

    clients: list[dict[str, Any]] = [{"podSelector": {}}]
    assert [True, True, False] == [told(enabled=False), told(enabled=True), told(enabled=True, clients=clients)]


def test_notes_with_keys() -> None:
    """With a secret of keys, the notes name it and do not advise to set up keys."""
    told = files.render({"apiKeys": {"existingSecret": "my-keys"}})["templates/NOTES.txt"]
    assert "Requests need an API key of the secret my-keys." in told
    assert "Every pod in the cluster can connect" in told
    assert "Everybody" not in told
    clients = {"enabled": True, "clients": [{"podSelector": {}}]}
    both = files.render({"apiKeys": {"existingSecret": "my-keys"}, "networkPolicy": clients})["templates/NOTES.txt"]
    assert "my-keys" in both
    assert "in the cluster can" not in both
    assert "API key of the secret" not in files.render({})["templates/NOTES.txt"]


def test_the_values_in_the_guide(tmp_path: Path) -> None:
    """What docs/guides/kubernetes.md shows is accepted: by the chart, and the file of keys by the service."""
    text = (files.ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)

    keys, *rest = blocks
    path = tmp_path / "keys.yaml"
    path.write_text(keys)
    ring = read_keys(AccessSettings(api_keys_file=path))
    assert ring is not None
    assert {"team-a", "prometheus"} == {key.name for key in ring.values()}
    values = list(map(yaml.safe_load, rest))
    assert 4 == len(values)
    for made in map(files.render, values):
        for manifest in (one for path, text in made.items() if path.endswith(".yaml") for one in files.documents(text)):
            valid(manifest, "latest")


def _set_values(command: str) -> dict[str, Any]:
    """Return the values that the ``--set`` options of *command* make."""
    values: dict[str, Any] = {}
    for path, text in re.findall(r"--set '?([\w.]+)='?(\{[^}]*\}|[^\s']+)", command):
        value: Any = text
        if text.startswith("{"):
            value = text.strip("{}").split(",")
        *parents, last = path.split(".")
        node = values
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return values


@every_case("name", ["docs/guides/kubernetes.md", "deploy/helm/triton-openai/README.md"])
def test_the_commands_of_the_documents(name: str) -> None:
    """Each `helm install --set` is accepted, and takes the image that the commands before it have pushed."""
    text = (files.ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    (pushed,) = re.findall(r"docker push (\S+)", text)
    commands = [_set_values(line) for line in re.findall(r"^helm install .*--set .*$", text, re.MULTILINE)]
    images = [files.service_container(_pod_of(values))["image"] for values in commands]

    assert pushed == images[-1]


def _pod_of(values: Mapping[str, Any]) -> Any:
    """Return the pods that the chart makes of *values*."""
    return files.documents(files.render(values)["templates/deployment.yaml"])[0]["spec"]["template"]["spec"]


def test_the_example_takes_the_image_that_was_pushed() -> None:
    """The tag of its values is the one of the commands, and not that of the chart."""
    values = files.load(files.ROOT / "examples/kubernetes/values.yaml")
    image = f"{values['image']['repository']}:{values['image']['tag']}"
    for name in ("examples/kubernetes/README.md", "docs/tutorials/tracing-on-kubernetes.md"):
        assert [image] == re.findall(r"docker push (\S+)", (files.ROOT / name).read_text(encoding="utf-8")), name


def test_the_values_that_the_chart_describes() -> None:
    """Each value that the README of the chart names is one of the chart."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = {tuple(name.split(".")) for row in rows for name in re.findall(r"`([\w.]+)`", row)}

    assert named
    assert named <= _keys(VALUES)


def test_settings_arrive_as_they_are() -> None:
    """Whatever stands under `settings` is the service's settings file."""
    settings = {"models": {"a/b": {"aliases": ["x: y", "#z"], "default_parameters": {"stop": ["\n", "{{ x }}"]}}}}
    made = files.documents(files.render({"settings": settings})["templates/configmap.yaml"])

    assert settings == yaml.safe_load(made[0]["data"]["settings.yaml"])
