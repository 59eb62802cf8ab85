"""The compose file: what it refers to exists, its variables are options, and profiles add what they should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from charonia.options.table import OPTIONS
from charonia.options.values import parse

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")


def rendered() -> dict[str, Any]:
    """The file with the defaults of its variables."""
    found = yaml.safe_load(VARIABLE.sub(r"\1", (INFRA / "docker-compose.yml").read_text()))
    assert isinstance(found, dict)
    return found


SERVICES: dict[str, Any] = rendered()["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}


def services_of(*profiles: str) -> set[str]:
    """What `up` starts with these profiles."""
    return {name for name, one in SERVICES.items() if not one.get("profiles") or set(one["profiles"]) & set(profiles)}


def test_the_profile_for_language_models_adds_its_executor_and_its_gateway() -> None:
    assert services_of("llm") - services_of() == {"executor-llm", "gateway-openai"}
    executor, gateway = SERVICES["executor-llm"], SERVICES["gateway-openai"]
    assert executor["environment"]["CHARONIA_POOL"] != SERVICES["executor"]["environment"]["CHARONIA_POOL"]
    assert executor["environment"]["CHARONIA_BACKEND_CONFIG"] == "llm,charonia.conversions=/conversions"
    assert "llm-conversions:/conversions" in executor["volumes"]
    assert executor["networks"] == ["internal"]
    assert gateway["ports"] == ["127.0.0.1:9000:9000"]
    assert gateway["environment"]["CHARONIA_ALLOW_OPENAI"] == "true"
    assert gateway["environment"]["CHARONIA_LOG_URL"] == SERVICES["gateway"]["environment"]["CHARONIA_LOG_URL"]


def test_the_profile_of_the_console_adds_it_alone() -> None:
    assert services_of("console") - services_of() == {"console"}
    console = SERVICES["console"]
    values = parse("console", [], console["environment"], {})
    parts = {"gateway", "gateway-openai", "batcher", "executor", "executor-gpu", "executor-llm"}
    assert set(values["metrics_url"]) == {f"dns+http://{name}:8002/metrics" for name in parts}
    assert parts <= set(SERVICES)
    assert (values["console_actions"], values["console_port"]) == (False, 8004)
    assert console["ports"] == ["127.0.0.1:8004:8004"]
    assert console["environment"]["CHARONIA_LOG_URL"] == SERVICES["operator"]["environment"]["CHARONIA_LOG_URL"]


@pytest.mark.parametrize("name", sorted(OURS))
def test_an_image_of_ours_is_a_target_and_its_variables_are_options(name: str) -> None:
    service = OURS[name]
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (INFRA / "Dockerfile").read_text(), re.MULTILINE))
    assert service["build"]["target"] in targets
    known = {option.variable for option in OPTIONS}
    assert set(service.get("environment", {})) <= known
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_secrets_volumes_and_networks_are_declared() -> None:
    whole = rendered()
    for name, service in SERVICES.items():
        assert set(service.get("secrets", ())) <= set(whole["secrets"]), name
        assert set(service.get("networks", ())) <= set(whole["networks"]), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0] if isinstance(volume, str) else volume["source"]
            assert source in whole["volumes"] or source.startswith((".", "/")), (name, volume)


def test_extras_of_images_exist() -> None:
    declared = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    used = re.findall(r"\.\[([\w,-]+)\]", (INFRA / "Dockerfile").read_text())
    assert {name for names in used for name in names.split(",")} <= set(declared)
    assert "openai" in ",".join(used)
    assert {"embedded,console", "console"} <= set(used)
