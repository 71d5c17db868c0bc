"""The deployment files name commands and options that `baton` has."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from baton.cli.main import app
from baton.router.members.sources.kubernetes import ROLE_LABEL

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SECRET = "0123456789abcdef0123456789abcdef"
VERIFY_S = 60.0


def shown(command: list[str]) -> str:
    """What `baton COMMAND --show-config` prints. It checks every option and starts nothing."""
    done = CliRunner().invoke(app, [*command, "--show-config"], env={"BATON_SECRET": SECRET})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_the_engines_of_the_compose_file_start_with_what_it_says(service: str) -> None:
    config = shown(SERVICES[service]["command"])
    assert "port = 8100  # command line --port" in config
    assert f'advertise_host = "{service}"' in config or f'"advertise_host" = "{service}"' in config
    assert "environment BATON_SECRET" in config


def test_the_router_of_the_compose_file_asks_these_engines() -> None:
    config = shown(SERVICES["router"]["command"])
    for service in ("prefill", "decode"):
        assert f"http://{service}:8100" in config
        assert SERVICES["router"]["depends_on"][service] == {"condition": "service_healthy"}


def test_engines_get_more_time_to_stop_than_they_take() -> None:
    config = shown(SERVICES["prefill"]["command"])
    drain_s = float(re.findall(r"# drain_timeout_s: (\d+)", config)[0])
    shutdown_s = float(re.findall(r"shutdown_timeout_s = ([\d.]+)", config)[0])
    for service in ("prefill", "decode"):
        assert float(SERVICES[service]["stop_grace_period"].removesuffix("s")) > drain_s + shutdown_s
    for unit in UNITS:
        [stop_s] = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
        assert float(stop_s) > drain_s + shutdown_s


def test_the_image_runs_the_wheel() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert "kv_baton-*.whl" in text
    assert 'ENTRYPOINT ["baton"]' in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_units_run_commands_that_baton_has(unit: Path) -> None:
    [start] = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.MULTILINE)
    program, command, option, _ = shlex.split(start)
    assert program == "/opt/baton/bin/baton"
    assert option == "--config"
    assert option in CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_understands_the_units(unit: Path, tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    # systemd-analyze also looks whether the program exists.
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/baton/bin/baton", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=VERIFY_S,
        check=False,
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])


# Kubernetes


KUBERNETES = "1.33"
STAND_IN = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: guide-ROLE}
spec:
  selector: {matchLabels: {app: ROLE}}
  template:
    metadata: {labels: {app: ROLE}}
    spec:
      containers:
        - name: modelserver
          image: docker.io/vllm/vllm-openai:v0.19.1
          command: [vllm, serve]
          args: [model, --kv-transfer-config, '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}']
          env: [{name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: "10.0.0.1"}]
"""
"""As llm-d's guide has them: its own are not on this machine."""


def rendered(overlay: str, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Resources of an overlay of deploy/kubernetes, by kind and name, each checked against its schema."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    root = folder / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", root, ignore=shutil.ignore_patterns("secret.env"))
    (root / "base/secret.env").write_text(f"BATON_SECRET={SECRET}\nBATON_API_KEY={SECRET}\n")
    own = root / overlay / "kustomization.yaml"
    text, count = re.subn(r"https://github\.com/llm-d/\S+", "stand-in.yaml", own.read_text())
    if count:
        own.write_text(text)
        stand_in = "---".join(STAND_IN.replace("ROLE", role) for role in ("prefill", "decode"))
        (root / overlay / "stand-in.yaml").write_text(stand_in)
    done = subprocess.run(
        [kubectl, "kustomize", str(root / overlay)],
        capture_output=True,
        text=True,
        timeout=VERIFY_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [*yaml.safe_load_all(done.stdout)]
    for resource in found:
        if resource["kind"] != "PodMonitor":  # A PodMonitor is a custom resource.
            kubernetes_validate.validate(resource, KUBERNETES, strict=True)
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def pod_of(resources: dict[tuple[str, str], dict[str, Any]], name: str) -> dict[str, Any]:
    pod: dict[str, Any] = resources["Deployment", name]["spec"]["template"]["spec"]
    return pod


def command_of(pod: dict[str, Any], **values: str) -> list[str]:
    """Arguments of the first container, with its variables replaced as Kubernetes does."""
    return [
        re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], argument)
        for argument in pod["containers"][0]["args"]
    ]


def transfer_config(pod: dict[str, Any]) -> dict[str, Any]:
    [text] = [one for one in pod["containers"][0]["args"] if one.startswith("--kv-transfer-config=")]
    config: dict[str, Any] = json.loads(text.partition("=")[2])
    return config


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_in_kubernetes_starts_and_may_stop_in_time(role: str, tmp_path: Path) -> None:
    pod = pod_of(rendered("base", tmp_path), role)
    config = shown(command_of(pod, POD_IP="10.0.0.7"))
    assert "10.0.0.7" in config
    [drain_s] = re.findall(r"^drain_timeout_s = ([\d.]+)", config, re.MULTILINE)
    [shutdown_s] = re.findall(r"^shutdown_timeout_s = ([\d.]+)", config, re.MULTILINE)
    assert pod["terminationGracePeriodSeconds"] > float(drain_s) + float(shutdown_s)


def test_the_router_in_kubernetes_finds_the_engines_and_may_read_them(tmp_path: Path) -> None:
    resources = rendered("base", tmp_path)
    pod = pod_of(resources, "router")
    config = shown(command_of(pod, POD_NAMESPACE="here"))
    [selector] = re.findall(r"kubernetes:here\?selector=(\w+=\w+)&port=http", config)
    label, _, value = selector.partition("=")
    for role in ("prefill", "decode"):
        service = resources["Service", role]
        assert service["metadata"]["labels"][label] == value
        assert service["metadata"]["labels"][ROLE_LABEL] == role
        labels = resources["Deployment", role]["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert [port["name"] for port in service["spec"]["ports"]] == ["http"]
    assert pod["serviceAccountName"] == resources["RoleBinding", "router"]["subjects"][0]["name"]
    [rule] = resources["Role", "router"]["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["list", "watch"],
    }


def test_engines_in_kubernetes_reach_each_other_at_the_ports_that_they_name(tmp_path: Path) -> None:
    resources = rendered("monitoring", tmp_path)
    [of_router, of_engines] = resources["NetworkPolicy", "engines"]["spec"]["ingress"]
    ports = {port["port"] for port in of_engines["ports"]}
    for role in ("prefill", "decode"):
        extra = transfer_config(pod_of(resources, role))["kv_connector_extra_config"]
        assert ports == {extra["port"], extra["data_port"]}
    assert of_router["ports"] == [{"port": "http"}]
    for name, target in (("baton-engines", "prefill"), ("baton-router", "router")):
        [endpoint] = resources["PodMonitor", name]["spec"]["podMetricsEndpoints"]
        names = [port["name"] for port in pod_of(resources, target)["containers"][0]["ports"]]
        assert endpoint["port"] in names
        assert endpoint["authorization"]["credentials"]["key"] in resources["Secret", "baton"]["data"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_vllm_in_kubernetes_has_the_connector_of_the_base_and_recomputes(role: str, tmp_path: Path) -> None:
    pods = [pod_of(rendered(name, tmp_path / name), role) for name in ("base", "vllm")]
    ours, theirs = map(transfer_config, pods)
    assert theirs.pop("kv_load_failure_policy") == "recompute"
    assert theirs == ours
    assert pods[1]["containers"][0]["command"] == ["vllm", "serve"]


def test_the_overlay_of_llm_d_names_the_pull_connector_last(tmp_path: Path) -> None:
    resources = rendered("llm-d", tmp_path)
    for role in ("prefill", "decode"):
        container = pod_of(resources, f"guide-{role}")["containers"][0]
        assert container["image"] == "baton-vllm:latest"
        config = json.loads(container["args"][-1].removeprefix("--kv-transfer-config="))
        assert config["kv_connector"] == "BatonPullConnector"
        assert {"BATON_HOST", "BATON_SECRET"} < {variable["name"] for variable in container["env"]}
