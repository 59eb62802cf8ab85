"""The Helm chart as `make helm` rendered it: what holds for every pod, and that all variables are options."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import shown_commands, values_page
from helm_chart.cases import CASES
from helm_chart.chart_files import CHART, GUIDE, PAGE, RENDERED, digest

from charonia.metrics.endpoint import LIVE, READY
from charonia.options.table import OPTIONS
from charonia.options.values import parse
from loadtest.boards.expressions import of_scaling

ROOT = Path(__file__).resolve().parents[2]
KEPT = tuple(name for name, case in CASES.items() if case.kept)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MANIFESTS: dict[str, list[dict[str, Any]]] = {
    name: [one for one in yaml.load_all((RENDERED / f"{name}.yaml").read_text(), _LOADER) if one] for name in KEPT
}
_OF_STORES = {f"TRITON_{cloud}_MOUNT_DIRECTORY" for cloud in ("AWS", "GCS", "AZURE")}
"""Variables of Triton that are no options; `infra/remote-models.yml` sets them, too."""
_GATEWAY_PATHS = {"/v2/health/live", "/v2/health/ready"}


def of_kind(case: str, *kinds: str) -> list[dict[str, Any]]:
    return [one for one in MANIFESTS[case] if one["kind"] in kinds]


def named(case: str, kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in of_kind(case, kind) if one["metadata"]["name"] == name)
    return found


def containers() -> Iterator[Any]:
    """Every container of ours: its case, what it belongs to, its pod's fields, and itself."""
    for case in KEPT:
        for one in of_kind(case, "Deployment", "ClusterServingRuntime"):
            pod = one["spec"]["template"]["spec"] if one["kind"] == "Deployment" else one["spec"]
            for container in pod["containers"]:
                yield pytest.param(case, one, pod, container, id=f"{case}-{one['metadata']['name']}")


def environment(container: dict[str, Any]) -> dict[str, str]:
    """What is known when the chart is rendered: a URL of a Secret is stood for by one without a user."""
    given = {one["name"]: one.get("value", "redis://redis:6379/0") for one in container["env"]}
    assert len(given) == len(container["env"]), "a variable is given twice"
    return given


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_the_manifests_are_of_this_chart() -> None:
    """Otherwise look at what `make helm HELM_FLAGS=--accept` changes."""
    assert (RENDERED / "digest").read_text().strip() == digest()
    assert {path.stem for path in RENDERED.glob("*.yaml")} == set(KEPT)


def test_the_page_of_values_is_of_these_values() -> None:
    assert PAGE.read_text() == values_page.page()


def test_a_value_without_a_description_is_noticed() -> None:
    schema = {"properties": {"a": {"description": "what", "properties": {"b": {"type": "string"}}}}}
    with pytest.raises(LookupError, match=r"^a\.b has no description"):
        values_page.rows({"a": {"b": ""}}, schema)
    with pytest.raises(LookupError, match="name different values"):
        values_page.rows({"a": {"b": "", "c": ""}}, schema)


@pytest.mark.parametrize(("case", "owner", "pod", "container"), list(containers()))
def test_every_variable_is_an_option_of_the_role(case: str, owner: Any, pod: Any, container: Any) -> None:
    """By the parser of the program itself: names, roles, types and bounds."""
    role, *flags = container["args"]
    given = environment(container)
    roles = {one.variable: one.roles for one in OPTIONS}
    assert {name for name in given if role not in roles.get(name, ())} <= _OF_STORES
    parsed = parse(role, flags, given, {})
    for option in OPTIONS:
        if option.variable in given and option.kind in ("int", "float"):
            assert float(given[option.variable]) == parsed[option.key]


@pytest.mark.parametrize(("case", "owner", "pod", "container"), list(containers()))
def test_every_container_is_confined(case: str, owner: Any, pod: Any, container: Any) -> None:
    security = container["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["runAsGroup"]) == (True, 10001, 10001)
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"] for one in pod["volumes"]}
    assert "/tmp" in mounts
    assert set(mounts.values()) <= volumes
    for path in re.findall(r"/run/secrets/charonia/\w+", str(container["env"])):
        assert path in mounts
    assert container["resources"]["limits"]["memory"]
    assert "requests" in container["resources"]


@pytest.mark.parametrize(("case", "owner", "pod", "container"), list(containers()))
def test_probes_ask_what_there_is(case: str, owner: Any, pod: Any, container: Any) -> None:
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert {"readinessProbe", "livenessProbe"} <= set(probes)
    for probe in probes.values():
        assert probe["port"] in ports or probe["port"] in ports.values()
    paths = {probe["path"] for probe in probes.values()}
    assert paths == (
        _GATEWAY_PATHS if container["args"][0] in ("gateway", "serve") else {LIVE.decode(), READY.decode()}
    )
    assert probes["readinessProbe"]["path"].endswith("ready")
    # what is not ready must not be killed for it: its models load, or the log is away
    assert all(probes[name]["path"].endswith("live") for name in probes if name != "readinessProbe")


@pytest.mark.parametrize("case", KEPT)
def test_pods_drain_within_their_grace_period(case: str) -> None:
    for deployment in of_kind(case, "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        given = environment(container)
        needed = float(given.get("CHARONIA_DRAIN_DELAY_SECS", 0))
        if container["args"] != ["console"]:  # it has nothing to finish
            needed += float(given["CHARONIA_EXIT_TIMEOUT_SECS"])
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if container["args"] == ["gateway"]:
            assert hook is not None
            assert hook[0] == "sleep"
            needed += float(hook[1])
        assert pod["terminationGracePeriodSeconds"] >= needed + 5
        if "executor" in container["args"]:  # a roll waits for readiness, and not for a time
            assert "minReadySeconds" not in deployment["spec"]
            assert deployment["spec"]["progressDeadlineSeconds"] >= 600
        assert pod["enableServiceLinks"] is False  # they would set variables whose names are options
        assert pod["automountServiceAccountToken"] is False
        spread = {one["topologyKey"] for one in pod["topologySpreadConstraints"]}
        assert spread == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}


@pytest.mark.parametrize("case", KEPT)
def test_what_selects_pods_finds_those_it_means(case: str) -> None:
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in of_kind(case, "Deployment")
    }
    roles = {name: labels["app.kubernetes.io/component"] for name, labels in pods.items()}
    for deployment in of_kind(case, "Deployment"):
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert [name for name, labels in pods.items() if selects(selector, labels)] == [deployment["metadata"]["name"]]
        of_spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert all(one["labelSelector"]["matchLabels"] == selector for one in of_spread)
    budgets = [one["spec"]["selector"]["matchLabels"] for one in of_kind(case, "PodDisruptionBudget")]
    for name, labels in pods.items():
        assert sum(selects(budget, labels) for budget in budgets) == 1, f"{name} needs one budget"
    for service in of_kind(case, "Service"):
        wanted = service["metadata"]["labels"]["app.kubernetes.io/component"]
        found = {name for name, labels in pods.items() if selects(service["spec"]["selector"], labels)}
        assert found == {name for name, role in roles.items() if role == wanted}
    policies = [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(case, "NetworkPolicy")]
    expected = 0 if case == "kserve" else 1
    for labels in pods.values():
        assert sum(selects(policy, labels) for policy in policies) == expected


@pytest.mark.parametrize("case", KEPT)
def test_who_scales_has_the_replicas_alone(case: str) -> None:
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in of_kind(case, "ScaledObject", "HorizontalPodAutoscaler")}
    for deployment in of_kind(case, "Deployment"):
        assert ("replicas" not in deployment["spec"]) == (deployment["metadata"]["name"] in scaled)
    assert scaled <= {one["metadata"]["name"] for one in of_kind(case, "Deployment")}


def test_networks_are_closed_but_for_what_is_needed() -> None:
    for case in ("small", "gpu-keda", "operator-hpa"):
        for policy in of_kind(case, "NetworkPolicy"):
            spec = policy["spec"]
            assert spec["policyTypes"] == ["Ingress", "Egress"]
            role = policy["metadata"]["labels"]["app.kubernetes.io/component"]
            entered = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
            of_console = {"console"} if case == "gpu-keda" else set()  # no one, unless peers are named
            wanted = {"gateway": {"metrics", "http", "grpc"}, "console": of_console}.get(role, {"metrics"})
            assert entered - {"openai"} == wanted
            left = {port["port"] for rule in spec["egress"] for port in rule["ports"]}
            assert left >= {53, 6379}
    (executor,) = (one for one in of_kind("small", "NetworkPolicy") if one["metadata"]["name"].endswith("executor"))
    assert {port["port"] for rule in executor["spec"]["egress"] for port in rule["ports"]} == {53, 6379, 26379}


def test_a_pool_with_gpus() -> None:
    deployment = named("gpu-keda", "Deployment", "demo-charonia-executor-gpu")
    spec = deployment["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry.example/charonia-executor-gpu:1.2.4"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert environment(container)["CHARONIA_POOL"] == "gpu"
    assert {one["key"] for one in pod["tolerations"]} == {"team", "nvidia.com/gpu"}
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    cpu = named("gpu-keda", "Deployment", "demo-charonia-executor-cpu")["spec"]["template"]["spec"]
    assert environment(cpu["containers"][0])["CHARONIA_LABEL"] == "disk=nvme\nzone=a"
    assert "nvidia.com/gpu" not in cpu["containers"][0]["resources"]["limits"]
    gateway = named("gpu-keda", "Deployment", "demo-charonia-gateway")["spec"]["template"]["spec"]["containers"][0]
    assert gateway["image"] == "registry.example/charonia-gateway:1.2.3"
    assert environment(gateway)["CHARONIA_LOG_URL"].startswith("rediss://gateway@")


def test_the_console_reaches_the_log_as_operator_and_the_metrics_of_all_pods() -> None:
    spec = named("gpu-keda", "Deployment", "demo-charonia-console")["spec"]
    assert spec["replicas"] == 1
    (container,) = spec["template"]["spec"]["containers"]
    given = environment(container)
    assert given["CHARONIA_LOG_URL"].startswith("rediss://operator@")
    assert given["CHARONIA_API_KEYS"].startswith("/run/secrets/charonia/keys/")
    headless = {
        one["metadata"]["name"]
        for one in of_kind("gpu-keda", "Service")
        if one["spec"].get("clusterIP") == "None" and one["metadata"]["labels"]["charonia-metrics"] == "true"
    }
    urls = given["CHARONIA_METRICS_URL"].split("\n")
    assert urls == [
        f"dns+http://demo-charonia-{role}-metrics:8002/metrics" for role in ("gateway", "batcher", "executor")
    ]
    assert {url.split("/")[2].partition(":")[0] for url in urls} <= headless
    # where scrapes are limited to peers, the console is one of them, and may go there itself
    labels = spec["template"]["metadata"]["labels"]
    for policy in of_kind("gpu-keda", "NetworkPolicy"):
        scrapes = [
            rule for rule in policy["spec"]["ingress"] if {"port": "metrics", "protocol": "TCP"} in rule["ports"]
        ]
        peers = [one["podSelector"]["matchLabels"] for rule in scrapes for one in rule["from"] if "podSelector" in one]
        assert any(selects(peer, labels) for peer in peers) == bool(scrapes)
        left = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        assert ("metrics" in left) == policy["metadata"]["name"].endswith("-console")
    alone = named("operator-hpa", "Deployment", "demo-charonia-console")["spec"]["template"]["spec"]["containers"][0]
    assert "CHARONIA_API_KEYS" not in environment(alone)
    assert environment(alone)["CHARONIA_CONSOLE_ACTIONS"] == "false"


def test_scaling_asks_for_the_pools_queued_work() -> None:
    scaled = named("gpu-keda", "ScaledObject", "demo-charonia-executor-gpu")
    queued, busy = scaled["spec"]["triggers"]
    assert (queued["metadata"]["threshold"], busy["metadata"]["threshold"]) == ("5", "0.7")
    assert 'charonia_release="serving/demo",charonia_pool="gpu",model=~"ocr_.+|identity"' in queued["metadata"]["query"]
    assert not re.search(r"RELEASE|POOL|MODELS|WINDOW|ASSUMED", queued["metadata"]["query"] + busy["metadata"]["query"])
    (monitor,) = of_kind("gpu-keda", "ServiceMonitor")
    relabelled = {one["targetLabel"]: one for one in monitor["spec"]["endpoints"][0]["relabelings"]}
    assert relabelled["charonia_release"]["replacement"] == "serving/demo"
    assert relabelled["charonia_pool"]["sourceLabels"] == ["__meta_kubernetes_pod_label_charonia_pool"]
    services = [one for one in of_kind("gpu-keda", "Service") if one["metadata"]["labels"].get("charonia-metrics")]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert all(selects(wanted, one["metadata"]["labels"]) for one in services)
    jobs = {one["metadata"]["labels"][monitor["spec"]["jobLabel"]] for one in services}
    assert jobs == {"gateway", "batcher", "executor", "webhooks"}


def test_an_hpa_asks_for_what_the_rule_records() -> None:
    scaled = named("operator-hpa", "HorizontalPodAutoscaler", "demo-charonia-executor-default")
    (external,) = (one["external"] for one in scaled["spec"]["metrics"] if one["type"] == "External")
    (rules,) = of_kind("operator-hpa", "PrometheusRule")
    recorded = rules["spec"]["groups"][0]["rules"]
    assert {one["record"] for one in recorded} == {external["metric"]["name"]}
    assert external["metric"]["selector"]["matchLabels"] in [one["labels"] for one in recorded]


def test_the_operators_redis_is_the_log() -> None:
    (redis,) = of_kind("operator-hpa", "RedisFailover")
    assert "maxmemory-policy noeviction" in redis["spec"]["redis"]["customConfig"]
    gateway = named("operator-hpa", "Deployment", "demo-charonia-gateway")["spec"]["template"]["spec"]["containers"][0]
    given = environment(gateway)
    assert given["CHARONIA_LOG_URL"] == "redis+sentinel://rfs-demo-charonia:26379/mymaster/0"
    assert given["CHARONIA_LOG_PASSWORD_FILE"] == "/run/secrets/charonia/log/password"


def test_images_are_targets_of_the_dockerfile() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "infra" / "Dockerfile").read_text(), re.MULTILINE))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {values["executorDefaults"]["image"], values["kserve"]["image"]} <= targets
    for case in KEPT:
        for one in of_kind(case, "Deployment"):
            (container,) = one["spec"]["template"]["spec"]["containers"]
            repository = CASES[case].values.get("image", {}).get("repository", "charonia")
            assert container["image"].rsplit(":", 1)[0].removeprefix(f"{repository}-") in targets


def test_the_compose_stack_and_the_images_ask_for_the_same_health() -> None:
    paths = {"gateway": "/v2/health/ready", "gateway-openai": "/v2/health/ready"}
    stages = (ROOT / "infra" / "Dockerfile").read_text().split("\nFROM ")
    asked = {
        stage.split("\n", 1)[0].rsplit(" ", 1)[1]: re.findall(r'healthcheck\.py", "\d+", "([^"]+)"', stage)
        for stage in stages
        if "HEALTHCHECK" in stage
    }
    assert set(asked) >= {"gateway", "batcher", "executor-cpu", "executor-gpu", "serve"}
    assert all(found == [paths.get(name, READY.decode())] for name, found in asked.items())
    compose = yaml.safe_load((ROOT / "infra" / "docker-compose.yml").read_text())["services"]
    assert compose["webhooks"]["healthcheck"]["test"][-2:] == ["8002", READY.decode()]


def test_defaults_are_those_of_the_compose_stack() -> None:
    """What the stack was tried with: durability, journal, retention, drains, leases."""
    compose = yaml.safe_load((ROOT / "infra" / "docker-compose.yml").read_text())["services"]
    for role in ("gateway", "batcher"):
        (container,) = named("small", "Deployment", f"demo-charonia-{role}")["spec"]["template"]["spec"]["containers"]
        given = environment(container)
        theirs = {
            name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))
            for name, value in compose[role]["environment"].items()
        }
        different = {name for name in given if name in theirs and theirs[name] != given[name]}
        assert different == {"CHARONIA_LOG_URL"} or different == set()
        assert set(theirs) - set(given) <= {
            *("CHARONIA_LOG_PASSWORD_FILE", "CHARONIA_TRACE_CONFIG"),
            "CHARONIA_HEARTBEAT_TTL_SECS" if role == "gateway" else "CHARONIA_GATEWAY_HEARTBEAT_TTL_SECS",
        }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
def test_queued_work_is_counted_in_seconds(tmp_path: Path) -> None:
    """`a`: 40 requests of 0.1 s each; `b`: 3 of an assumed second, for none ran yet; `c` belongs to another release."""
    query = of_scaling("600s")["scaling: queued-work"]
    of_release, of_pool = 'charonia_release="serving/demo"', 'charonia_pool="default"'
    series = {
        f'nv_inference_pending_request_count{{{of_release},model="a",version="1"}}': "40x60",
        f'nv_inference_pending_request_count{{{of_release},model="b",version="1"}}': "3x60",
        'nv_inference_pending_request_count{charonia_release="serving/other",model="c",version="1"}': "9x60",
        # of two phases and two executors, which run 600 requests a minute in 60 s of instance time
        **{
            "charonia_executor_compute_seconds_total"
            f'{{{of_release},{of_pool},model="a",phase="{phase}",instance="{one}"}}': "0+15x60"
            for phase in ("input", "infer")
            for one in (1, 2)
        },
        **{
            f'nv_inference_request_success{{{of_release},{of_pool},model="a",version="1",instance="{one}"}}': "0+300x60"
            for one in (1, 2)
        },
        f'nv_inference_request_success{{{of_release},model="a",version="1",instance="gateway"}}': "0+9x60",
        f'charonia_executor_compute_seconds_total{{{of_release},{of_pool},model="b",phase="infer"}}': "0x60",
        f'nv_inference_request_success{{{of_release},{of_pool},model="b",version="1"}}': "0x60",
    }
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "g", "rules": [{"record": "queued", "expr": query}]}]})
    )
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": "queued", "eval_time": "30m", "exp_samples": [{"labels": "queued", "value": 7}]}],
    }
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- the page about Kubernetes, as `make helm` follows it --------------------------------------------------------------

UPGRADE = "$ helm upgrade --install serving infra/helm/charonia --namespace serving --values values.yaml"
ROLLOUT = "$ kubectl -n serving rollout status deployment/serving-charonia-gateway"


def test_the_page_about_kubernetes_shows_what_can_be_followed() -> None:
    shown = shown_commands.read(GUIDE.read_text())
    assert shown.values.startswith("# values.yaml\n")
    assert {upgrade.chart for upgrade in shown.upgrades} == {"infra/helm/charonia"}
    assert {followed.kind for followed in shown.followed} == {"deployment", "svc"}
    assert len(shown.services) == 1


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("# values.yaml\n", "# my-values.yaml\n", r" 0 blocks of YAML begin with '# values.yaml'; expected is one"),
        ("$ helm upgrade ", "$ helm install ", r" no block .* '\$ helm upgrade RELEASE CHART --values FILE'"),
        (UPGRADE, UPGRADE.split(" infra")[0], r"LINE: .* begins with no release and chart; expected is 'helm upgrade"),
        (UPGRADE, UPGRADE.replace("serving infra", "-n serving infra"), r"LINE: .* no release and chart; expected is"),
        (UPGRADE, UPGRADE.replace("charonia ", "nothing "), r"LINE: .* infra/helm/nothing is the folder of no chart"),
        (UPGRADE, UPGRADE.replace("--values values.yaml", ""), r"LINE: .* has not one '--values FILE'; expected is"),
        (UPGRADE, UPGRADE.removesuffix(" values.yaml"), r"LINE: .* has not one '--values FILE'; expected is"),
        (
            UPGRADE,
            UPGRADE.replace(" values.", " other."),
            r"LINE: .* reads other.yaml; expected is values.yaml",
        ),
        (UPGRADE, UPGRADE + " '", r"LINE: .* is no line of a shell: No closing quotation"),
        (
            ROLLOUT,
            "$ kubectl get pods",
            r"LINE: 'kubectl get pods' names nothing .* expected at its end is deployment/",
        ),
        ("metadata: {name: ocr}", "metadata: {name: ocr", r"[0-9]+: the block is not YAML: "),
        ("apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService", "- nothing", r"[0-9]+: the block "),
        (
            "      runtime: charonia\n",
            "",
            r"[0-9]+: the InferenceService has None at spec.predictor.model.runtime; exp",
        ),
        ("modelFormat: {name: triton}", "modelFormat: triton", r"[0-9]+: .* has None at .*modelFormat.name; expected"),
    ],
)
def test_a_page_of_another_form_is_a_fault_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str, after: str, said: str
) -> None:
    text = GUIDE.read_text()
    assert before in text
    line = str(text[: text.index(before)].count("\n") + 1)
    page = tmp_path / "kubernetes.md"
    page.write_text(text.replace(before, after))
    monkeypatch.setattr(shown_commands, "GUIDE", page)
    (fault,) = shown_commands.faults(True)
    assert re.match(f"kubernetes.md:{said.replace('LINE', line)}", fault), fault
