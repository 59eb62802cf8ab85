"""What agents say before a model is loaded (C23, R43)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from charonia.models.config_errors import StructureError
from charonia.models.config_forms import parse
from executors.repository.repository_agents import DEFAULT_DIRECTORY, RepositoryAgents

CONTENT = b"weights"
MD5 = hashlib.md5(CONTENT).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(CONTENT)
    return tmp_path / "m"


def run(model: Path, *agents: str, directory: str = "") -> None:
    blocks = " ".join(f"agents {{ {agent} }}" for agent in agents)
    RepositoryAgents(directory).run(model, parse(f"model_repository_agents {{ {blocks} }}"))


def checksum(digest: str) -> str:
    return f'name: "checksum" parameters {{ key: "MD5:1/model.onnx" value: "{digest}" }}'


def test_the_built_in_agent_is_found_without_a_directory(model: Path) -> None:
    run(model, checksum(MD5), checksum(MD5))
    run(model)


def test_a_refusal_is_a_failure_to_poll(model: Path) -> None:
    with pytest.raises(StructureError) as raised:
        run(model, checksum(MD5), checksum("00"))
    assert raised.value.message == f"Mismatched MD5 hash for file 1/model.onnx, expect: 00, got: {MD5}"


def test_an_agent_that_is_not_there_is_named_with_where_it_was_looked_for(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StructureError) as raised:
        run(model, 'name: "sign"')
    assert raised.value.message == (
        f"unable to find 'libtritonrepoagent_sign.so' for repo agent 'sign', searched: {DEFAULT_DIRECTORY}"
    )
    with pytest.raises(StructureError) as raised:
        run(model, 'name: "sign"', directory=str(tmp_path))
    assert raised.value.message.endswith(f"searched: {tmp_path}")


def test_agents_go_in_their_order(model: Path) -> None:
    with pytest.raises(StructureError, match="repo agent 'sign'"):
        run(model, 'name: "sign"', checksum("00"))


def test_a_library_is_not_loaded(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sign").mkdir()
    (tmp_path / "sign" / "libtritonrepoagent_sign.so").write_bytes(b"")
    with pytest.raises(StructureError) as raised:
        run(model, 'name: "sign"', directory=str(tmp_path))
    assert raised.value.message == (
        f"the repository agent 'sign' ({tmp_path}/sign/libtritonrepoagent_sign.so) is a library for another server: "
        "only 'checksum' is built in"
    )


@pytest.mark.parametrize("name", ["..", ".", "", "a/b"])
def test_a_name_leads_nowhere_else(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / f"libtritonrepoagent_{Path(name).name}.so").parent.mkdir(exist_ok=True)
    with pytest.raises(StructureError, match="unable to find"):
        run(model, f'name: "{name}"', directory=str(tmp_path))
