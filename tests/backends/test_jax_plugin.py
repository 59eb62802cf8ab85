"""The plug-in for JAX, as it is installed: exports against the same functions in jax."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax_model
import numpy as np
import pytest
from backend_calls import instance_of, signature_of
from e2e_server import serving
from jax import export
from jax import numpy as jnp
from tritonclient import http as client
from tritonclient.utils import InferenceServerException

from charonia.backend import ENTRY_POINT_GROUP, TensorSignature
from charonia.errors import CharoniaError, InvalidArgument, NotFound, Unsupported
from charonia.testing.backend_contract import CHECKS, Check, Inputs, ReferenceModel, check_repeated_loads
from executors.backends.registry import BackendRegistry

CONFIG = """
max_batch_size: 6
input { name: "image" data_type: TYPE_FP32 dims: 4 } input { name: "scale" data_type: TYPE_FP32 dims: 1 }
output { name: "scores" data_type: TYPE_FP32 dims: 3 } output { name: "best" data_type: TYPE_INT32 dims: 1 reshape {} }
"""
NUMBERS = np.random.default_rng(8)


def request(rows: int) -> dict[str, np.ndarray]:
    return {
        "image": NUMBERS.normal(size=(rows, 4)).astype(np.float32),
        "scale": NUMBERS.uniform(0.5, 4, size=(rows, 1)).astype(np.float32),
    }


def expected(inputs: Inputs) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in jax_model.scoring(**inputs).items()}


def model(directory: Path, config: str = CONFIG) -> ReferenceModel:
    if not directory.exists():
        jax_model.saved(directory, jax_model.scoring_file())
    return ReferenceModel.of(
        directory,
        config,
        expected=expected,
        requests=[request(2), request(1), request(3)],
        failing={"image": np.zeros((2, 5), np.float32), "scale": np.ones((2, 1), np.float32)},
        strict=True,
        rtol=1e-6,
    )


def opened(directory: Path, content: bytes, config: str = "") -> ReferenceModel:
    return model(jax_model.saved(directory, content), config)


async def error_of(of: ReferenceModel) -> CharoniaError:
    with pytest.raises(CharoniaError) as caught:
        await instance_of(BackendRegistry().get("jax"), of.spec())
    return caught.value


def threads_of(directory: Path) -> int:
    """How many threads the process of a served model has."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (process / "cmdline").read_bytes()
            if b"executors.isolation.child.process_entry" in words and str(directory).encode() in words:
                found.append(len(list((process / "task").iterdir())))
    return max(found)


def test_it_is_installed_as_a_distribution_of_its_own() -> None:
    (entry,) = metadata.entry_points(group=ENTRY_POINT_GROUP, name="jax")
    assert entry.dist is not None
    assert entry.dist.name == "charonia-jax"
    assert entry.load().isolation == "sandbox"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, tmp_path: Path) -> None:
    of = model(tmp_path / "m")
    if check is check_repeated_loads:  # nearly all of its time is compiling: here two programs a load, not four
        small = model(tmp_path / "m", CONFIG.replace("max_batch_size: 6", "max_batch_size: 2"))
        of = replace(small, requests=[request(1), request(1)], loads=60)
    await check(BackendRegistry().get("jax"), of)


async def test_numbers_of_rows_share_programs(tmp_path: Path) -> None:
    loaded = await BackendRegistry().get("jax").load(model(tmp_path / "m").source)
    instance = await loaded.create_instance(model(tmp_path / "m").spec())
    assert instance.batch_sizes == (1, 2, 4, 6)
    assert [shapes[0][0] for _, shapes in loaded._programs] == [1, 2, 4, 6]


async def test_names_come_from_keywords_and_keys_else_from_positions(tmp_path: Path) -> None:
    rows, length = export.symbolic_shape("rows, length")

    def mixed(first: Any, second: Any, *, named: Any) -> Any:
        return (first, {"sum": second["a"] + named["x"]["y"]}, [first, second["a"]])

    content = jax_model.exported(
        mixed,
        jax_model.of((rows, length), jnp.bfloat16),
        {"a": jax_model.of((rows, 2), np.int64)},
        named={"x": {"y": jax_model.of((rows, 2), np.int64)}},
    )
    of = opened(tmp_path / "m", content)
    found = await signature_of(BackendRegistry().get("jax"), of.source)
    assert found.inputs == (
        TensorSignature("INPUT__0", "BF16", (-1, -1)),
        TensorSignature("a", "INT64", (-1, 2)),
        TensorSignature("named.x.y", "INT64", (-1, 2)),
    )
    assert [tensor.name for tensor in found.outputs] == ["OUTPUT__0", "sum", "OUTPUT__2", "OUTPUT__3"]
    instance = await instance_of(BackendRegistry().get("jax"), of.spec())
    given = {
        "INPUT__0": np.ones((2, 3), jnp.bfloat16),
        "a": np.full((2, 2), 1 << 40),
        "named.x.y": np.ones((2, 2), np.int64),
    }
    answer = instance.execute(given, ["sum", "OUTPUT__0"])
    assert answer["sum"].tolist() == [[(1 << 40) + 1] * 2] * 2
    assert answer["OUTPUT__0"].dtype == jnp.bfloat16


async def test_no_more_programs_are_kept_than_are_allowed(tmp_path: Path) -> None:
    (length,) = export.symbolic_shape("length")
    content = jax_model.exported(lambda x: x * 2, jax_model.of((length,)))
    of = opened(tmp_path / "m", content, 'parameters { key: "XLA_PROGRAMS" value { string_value: "3" } }')
    loaded = await BackendRegistry().get("jax").load(of.source)
    instance = await loaded.create_instance(of.spec())
    for size in (1, 2, 3, 1, 4, 5):
        given = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(instance.execute({"INPUT__0": given}, ["OUTPUT__0"])["OUTPUT__0"], given * 2)
    assert [shapes for _, shapes in loaded._programs] == [((1,),), ((4,),), ((5,),)]


async def test_functions_of_lapack_may_be_called_and_others_may_not(tmp_path: Path) -> None:
    square = jax_model.of((3, 3))
    of = opened(tmp_path / "solve", jax_model.exported(jnp.linalg.inv, square))
    given = np.diag([1, 2, 4]).astype(np.float32)
    instance = await instance_of(BackendRegistry().get("jax"), of.spec())
    np.testing.assert_allclose(
        instance.execute({"INPUT__0": given}, ["OUTPUT__0"])["OUTPUT__0"], np.diag([1, 0.5, 0.25]), rtol=1e-6
    )

    def calling(x: Any) -> Any:
        return jax.ffi.ffi_call("xla_ffi_python_cpu_callback", jax.ShapeDtypeStruct((3, 3), np.float32))(
            x, index=np.uint64(0)
        )

    checks = [export.DisabledSafetyCheck.custom_call("xla_ffi_python_cpu_callback")]
    content = bytes(export.export(jax.jit(calling), disabled_checks=checks, platforms=["cpu"])(square).serialize())
    error = await error_of(opened(tmp_path / "evil", content))
    assert isinstance(error, InvalidArgument)
    assert error.message == "model 'evil' calls what no export may: xla_ffi_python_cpu_callback"


async def test_files_and_configurations_that_are_wrong(tmp_path: Path) -> None:
    good = model(tmp_path / "good")
    assert isinstance(await error_of(model(tmp_path / "good", 'default_model_filename: "x"' + CONFIG)), NotFound)
    error = await error_of(model(tmp_path / "good", 'default_model_filename: "../../x"' + CONFIG))
    assert "outside the version directory" in error.message
    error = await error_of(model(tmp_path / "good", CONFIG.replace('"scores"', '"points"')))
    assert error.message == "model 'good' has no tensor 'points', it has ['best', 'scores']"
    error = await error_of(model(tmp_path / "good", CONFIG.replace("dims: 4", "dims: 5")))
    assert isinstance(error, InvalidArgument)
    assert "the export does not take shapes [[1, 5], [1, 1]]" in error.message
    threads = 'parameters { key: "XLA_THREADS" value { string_value: "2" } }'
    error = await error_of(model(tmp_path / "good", CONFIG + threads))
    assert "need a process of its own" in error.message
    instance = await instance_of(BackendRegistry().get("jax"), good.spec())
    with pytest.raises(InvalidArgument, match=r"'image' is float64 of shape \[2, 4\], the export takes float32"):
        instance.execute(request(2) | {"image": np.ones((2, 4))}, ["scores"])

    gpu = opened(tmp_path / "gpu", jax_model.exported(jnp.sin, jax_model.of((3,)), platforms=("cuda",)))
    error = await error_of(gpu)
    assert "was exported for cuda, but has an instance of kind CPU: export with platforms=['cpu', ...]" in error.message
    loaded = await BackendRegistry().get("jax").load(gpu.source)
    with pytest.raises(Unsupported, match="asks for an instance on GPU 0, but JAX has none where it runs"):
        await loaded.create_instance(replace(gpu.spec(), kind="GPU", device_id=0))
    loaded = await BackendRegistry().get("jax").load(good.source)
    with pytest.raises(
        InvalidArgument, match=r"exported for cpu, but has an instance of kind GPU: .*\['cuda', \.\.\.\]"
    ):
        await loaded.create_instance(replace(good.spec(), kind="GPU", device_id=0))
    small = jax_model.exported(jnp.sin, jax_model.of((3,), jnp.float8_e4m3fn))
    error = await error_of(opened(tmp_path / "small", small))
    assert isinstance(error, Unsupported)
    assert "tensor 'INPUT__0' of model 'small' is float8_e4m3fn, which has no datatype" in error.message


def test_instances_on_gpus_run_on_theirs(tmp_path: Path) -> None:
    """Two devices of the processor stand in for GPUs: JAX places and compiles for them as for any others."""
    jax_model.saved(tmp_path / "m", jax_model.scoring_file())
    done = subprocess.run(
        [sys.executable, "-c", "import sys, jax_model; jax_model.placed(sys.argv[1])", str(tmp_path / "m")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *placed, refused = done.stdout.splitlines()
    assert placed == [f"on {device}: programs {[device] * 4}, answers equal" for device in (1, 0)]
    assert refused == "model 'm' asks for an instance on GPU 2, but JAX has 0, 1 where it runs"


@pytest.mark.parametrize(("of_server", "of_process"), [("4,GPU-c0ffee", "GPU-c0ffee"), (None, "1")])
def test_the_process_of_a_gpu_sees_that_gpu_alone(of_server: str | None, of_process: str, tmp_path: Path) -> None:
    """CUDA reads the variable when JAX looks for devices, which it must not have done before."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment |= {} if of_server is None else {"CUDA_VISIBLE_DEVICES": of_server}
    jax_model.saved(tmp_path / "m", jax_model.exported(jnp.sin, jax_model.of((3,))))
    done = subprocess.run(
        [sys.executable, "-c", "import sys, jax_model; jax_model.seen(sys.argv[1])", str(tmp_path / "m")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        *(f"1: sees {of_process}, devices known False", "on 0"),
        *(f"1: sees {of_process}, devices known True", "on 0"),
    ]


async def test_a_file_of_another_version_is_refused_in_words(tmp_path: Path) -> None:
    content = jax_model.scoring_file()
    version = export.maximum_supported_calling_convention_version
    # the table of the export holds the version in two bytes
    from jax._src.export.serialization_generated import Exported

    table = Exported.GetRootAsExported(bytearray(content))
    assert table.CallingConventionVersion() == version
    changed = bytearray(content)
    for position in range(len(changed) - 1):
        if changed[position : position + 2] == version.to_bytes(2, "little"):
            changed[position] = 77
            if Exported.GetRootAsExported(changed).CallingConventionVersion() == 77:
                break
            changed[position] = version
    error = await error_of(opened(tmp_path / "m", bytes(changed)))
    assert "was written with version 77 of the calling convention, jax " in error.message


def test_broken_files_are_refused_in_words_or_end_their_own_process_only(tmp_path: Path) -> None:
    """Truncated ones, and ones with some bytes changed: XLA's reader crashes on a few, and never ends on others."""
    content = jax_model.scoring_file()
    files = {f"cut{size}": content[:size] for size in (0, 1, 4, 100, len(content) // 2, len(content) * 9 // 10)}
    for seed in range(24):
        chosen, changed = random.Random(seed), bytearray(content)
        for _ in range(4):
            changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        files[f"changed{seed:02}"] = bytes(changed)
    for name, made in files.items():
        jax_model.saved(tmp_path / name, made)
    done = subprocess.run(
        [sys.executable, "-c", "import sys, jax_model; jax_model.child(sys.argv[1])", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    results = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.split(" ")[0] in files)
    print(done.stdout, done.stderr[-2000:])
    assert results.keys() == files.keys()
    assert all(" is no export of jax, or a broken one: " in text for name, text in results.items() if name[1] == "u")
    assert sum(text.startswith("refused: ") for text in results.values()) > 12
    assert {text for text in results.values() if text.startswith("ended")} <= {
        "ended by SIGSEGV",
        "ended by SIGABRT",
        "ended by SIGALRM",
    }


def test_they_are_served_with_configurations_that_are_completed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    jax_model.saved(models / "scoring", jax_model.scoring_file())
    numbers = np.arange(30_000, dtype=np.float32)
    # 3.6 GB, twice
    jax_model.saved(
        models / "large", jax_model.exported(lambda x: jnp.sort(x[:, None] * x, 1).sum(1), jax_model.of(numbers.shape))
    )
    jax_model.saved(models / "broken", b"junk")
    for name, threads in (("scoring", 1), ("large", 9)):
        (models / name / "config.pbtxt").write_text(
            f'parameters {{ key: "XLA_THREADS" value {{ string_value: "{threads}" }} }} '
            'parameters { key: "MEMORY_LIMIT_BYTES" value { string_value: "3000000000" } }'
        )
    loaded = [f"--load-model={name}" for name in ("scoring", "large")]

    with (
        serving(models, tmp_path / "state", "--model-control-mode=explicit", *loaded) as server,
        client.InferenceServerClient(server.http, network_timeout=120) as asked,
    ):
        config = asked.get_model_config("scoring")
        assert config["backend"] == "jax"
        assert config["parameters"]["charonia.isolation"]["string_value"] == "sandbox"
        assert [(one["name"], one["data_type"], one["dims"]) for one in config["input"]] == [
            ("image", "TYPE_FP32", [4]),
            ("scale", "TYPE_FP32", [1]),
        ]
        given = request(3)
        tensors = []
        for name, array in given.items():
            tensors.append(client.InferInput(name, list(array.shape), "FP32"))
            tensors[-1].set_data_from_numpy(array)
        answer = asked.infer("scoring", tensors)
        wanted = expected(given)
        np.testing.assert_allclose(answer.as_numpy("scores"), wanted["scores"], rtol=1e-6)
        np.testing.assert_array_equal(answer.as_numpy("best")[:, 0], wanted["best"])
        assert threads_of(models / "scoring") < threads_of(models / "large")
        tensor = client.InferInput("INPUT__0", [len(numbers)], "FP32")
        tensor.set_data_from_numpy(numbers)
        with pytest.raises(InferenceServerException) as refused:
            asked.infer("large", [tensor])
        assert "emory" in str(refused.value) or "not healthy" in str(refused.value)
        np.testing.assert_allclose(asked.infer("scoring", tensors).as_numpy("scores"), wanted["scores"], rtol=1e-6)
        with pytest.raises(InferenceServerException, match=r"model 'broken' is no export of jax, or a broken one: "):
            asked.load_model("broken")
