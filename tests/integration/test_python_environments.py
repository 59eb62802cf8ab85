"""Model processes in environments of their own, python-based backends, models of several files (P1, P18, P20)."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
from backend_calls import instance_of, signature_of

from charonia.backend import InstanceSpec, ModelRequest, ModelSource
from charonia.errors import InternalError
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from executors.backends.python import PythonBackend
from protos.model_config_pb2 import ModelConfig

TELLS = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils
{imports}

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}})
        config.add_output({{"name": "OUT", "data_type": "TYPE_STRING", "dims": [-1]}})
        config.set_max_batch_size(4)
        return config

    def execute(self, requests):
        told = np.array([[{told}]], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", told)]) for _ in requests]
"""
LEAK = """
def protobuf():
    try:
        import google.protobuf
    except ImportError:
        return "no protobuf"
    return "the server's protobuf"
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def source(directory: Path, name: str, *, env: str = "", word: str = "python", **settings: str) -> ModelSource:
    config = ModelConfig(name=name, backend=word)
    if env:
        config.parameters["EXECUTION_ENV_PATH"].string_value = env
    given = {"environment-cache-dir": str(directory / "cache"), **settings}
    return ModelSource(name, 1, directory / name, config, {key.replace("_", "-"): text for key, text in given.items()})


async def told(model: ModelSource) -> list[str]:
    """What the model says of itself, loaded with its auto-completed configuration."""
    backend = PythonBackend()
    completed = await signature_of(backend, model)
    assert completed is not None
    model = ModelSource(model.name, model.version, model.directory, completed, model.backend_config)
    spec = InstanceSpec(f"{model.name}_0", "CPU", -1, model, ModelInterface.of(completed))
    instance = await instance_of(backend, spec)
    try:
        request = ModelRequest("", 0, [Tensor.of("IN", np.zeros((1, 1), np.float32))], (), {})
        (answer,) = await instance.execute_requests([request])
        assert answer.error is None, answer.error
        return [text.decode() for text in answer.outputs[0].array()[0]]
    finally:
        await instance.close_instance()


def site_packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real virtual environment with a package of its own; NumPy and msgpack are lent to it."""
    root = tmp_path_factory.mktemp("environments") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (site_packages(root) / "only_here.py").write_text("WORD = 'of the environment'\n")
    return root


@pytest.mark.parametrize("packed", [False, True])
async def test_a_model_runs_in_its_environment(packed: bool, environment: Path, tmp_path: Path) -> None:
    words = "sys.prefix, only_here.WORD, protobuf(), np.__name__"
    write(tmp_path / "m/1/model.py", TELLS.format(imports="import only_here\n" + LEAK, told=words))
    env = str(environment)
    if packed:
        with tarfile.open(tmp_path / "m/env.tar.gz", "w:gz") as tar:
            tar.add(environment, "inner")
        env = "$$TRITON_MODEL_DIRECTORY/env.tar.gz"
    prefix, word, protobuf, numpy = await told(source(tmp_path, "m", env=env))
    if packed:
        assert Path(prefix).is_relative_to(tmp_path / "cache")
        assert Path(prefix).name == "inner"
    else:
        assert prefix == env
    assert (word, protobuf, numpy) == ("of the environment", "no protobuf", "numpy")


async def test_the_environments_own_packages_go_before_those_that_are_lent(environment: Path, tmp_path: Path) -> None:
    write(tmp_path / "m/1/model.py", TELLS.format(imports="import msgpack\n", told="msgpack.__file__, 'x'"))
    packages = site_packages(environment)
    import msgpack

    (packages / "msgpack").symlink_to(Path(msgpack.__file__).parent)
    try:
        file, _ = await told(source(tmp_path, "m", env=str(environment)))
    finally:
        (packages / "msgpack").unlink()
    assert Path(file).is_relative_to(environment)


async def test_an_environment_without_numpy_that_works_says_so(tmp_path: Path, environment: Path) -> None:
    write(tmp_path / "m/1/model.py", TELLS.format(imports="", told="'x'"))
    packages = site_packages(environment)
    write(packages / "numpy/__init__.py", "raise ImportError('broken on purpose')")
    try:
        with pytest.raises(InternalError, match=r"has no NumPy that works.*broken on purpose"):
            await told(source(tmp_path, "m", env=str(environment)))
    finally:
        (packages / "numpy/__init__.py").unlink()
        (packages / "numpy").rmdir()


async def test_a_python_based_backend_serves_models_that_name_it(tmp_path: Path) -> None:
    code = TELLS.format(
        imports="import part, os", told="part.WORD, os.path.basename(pb_utils.get_model_dir()), open(SETTINGS).read()"
    ).replace("class Tri", 'SETTINGS = os.path.join(pb_utils.get_model_dir(), "model.json")\n\nclass Tri')
    write(tmp_path / "backends/teller/model.py", code)
    write(tmp_path / "backends/teller/part.py", "WORD = 'of the backend'")
    write(tmp_path / "m/1/model.json", "settings of m")
    model = source(tmp_path, "m", word="teller", backend_directory=str(tmp_path / "backends"))
    assert await told(model) == ["of the backend", "1", "settings of m"]


async def test_modules_of_one_name_in_two_models_do_not_meet(tmp_path: Path) -> None:
    imports = "import rules, words.deep\nfrom . import near\nfrom .pack import inner\n"
    for name in ("one", "two"):
        write(
            tmp_path / name / "1/model.py",
            TELLS.format(imports=imports, told="rules.WORD, words.deep.WORD, near.WORD, inner.WORD"),
        )
        write(tmp_path / name / "rules.py", f"WORD = 'rules of {name}'")
        write(tmp_path / name / "1/words/__init__.py", "")
        write(tmp_path / name / "1/words/deep.py", "from rules import WORD as ABOVE\nWORD = 'deep, ' + ABOVE")
        write(tmp_path / name / "1/near.py", f"WORD = 'near {name}'")
        write(tmp_path / name / "1/pack/inner.py", "from ..near import WORD")
    for name in ("one", "two"):
        assert await told(source(tmp_path, name)) == [
            f"rules of {name}",
            f"deep, rules of {name}",
            f"near {name}",
            f"near {name}",
        ]
