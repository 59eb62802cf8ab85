"""The plug-in for DALI (`make test-dali`): real JPEG files, broken ones among them, against DALI and Pillow alone."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import charonia_dali
import numpy as np
import pytest
import sklearn.datasets
from backend_calls import instance_of, signature_of
from charonia_dali import DaliBackend, described
from e2e_server import serving
from nvidia.dali import fn, pipeline_def, types
from PIL import Image
from tritonclient import grpc
from tritonclient import http as client
from tritonclient.utils import InferenceServerException

from charonia.backend import ENTRY_POINT_GROUP, InstanceSpec, ModelRequest, ModelSource, TensorSignature
from charonia.errors import CharoniaError, InternalError, InvalidArgument, NotFound, Unsupported
from charonia.models.config_forms import parse
from charonia.models.interface import ModelInterface
from charonia.tensors import Tensor
from charonia.testing.backend_contract import CHECKS, Check, ReferenceModel
from executors.backends.registry import BackendRegistry
from executors.configuration.autofill import from_graph
from executors.configuration.config import normalise

IMAGES = Path(sklearn.datasets.__file__).parent / "images"
CHINA, FLOWER = (IMAGES / f"{name}.jpg" for name in ("china", "flower"))
BYTES = """
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 10000000 }
input { name: "DALI_INPUT_0" data_type: TYPE_STRING dims: 1 }
output { name: "DALI_OUTPUT_0" data_type: TYPE_FP32 dims: [ 3, 32, 48 ] }
"""
UINT8 = BYTES.replace("TYPE_STRING dims: 1", "TYPE_UINT8 dims: -1 allow_ragged_batch: true")
PROGRAM = """
import nvidia.dali as dali
from nvidia.dali.plugin.triton import autoserialize

@autoserialize
@dali.pipeline_def(batch_size=3, num_threads=1, device_id=0)
def doubled():
    return dali.fn.external_source(device="cpu", name="NUMBERS", dtype=dali.types.FLOAT, ndim=1) * 2
"""


@pipeline_def(batch_size=2, num_threads=1, device_id=None, output_dtype=[types.FLOAT], output_ndim=[3])
def thumbnails() -> Any:
    encoded = fn.external_source(device="cpu", name="DALI_INPUT_0", dtype=types.UINT8, ndim=1)
    image = fn.resize(fn.decoders.image(encoded, device="cpu", output_type=types.RGB), size=(32, 48))
    return fn.crop_mirror_normalize(image, mean=[127.5] * 3, std=[127.5] * 3, output_layout="CHW", dtype=types.FLOAT)


@pipeline_def(batch_size=2, num_threads=1, device_id=None)
def pixels() -> Any:
    return fn.decoders.image(fn.external_source(device="cpu", name="FILE"), device="cpu", output_type=types.RGB)


@pipeline_def(batch_size=2, num_threads=1, device_id=None)
def frames() -> Any:
    video = fn.external_source(device="cpu", name="VIDEO", dtype=types.FLOAT, ndim=2)
    return video * 2, fn.reductions.sum(video, axes=[0, 1])


@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def reading(path: Path) -> Any:
    found, _ = fn.readers.file(files=[str(path)])
    return found, fn.external_source(device="cpu", name="ASKED")


def content(pipeline: Any) -> bytes:
    found = pipeline.serialize()
    assert isinstance(found, bytes)
    return found


def saved(directory: Path, pipeline: Any) -> Path:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.dali").write_bytes(content(pipeline))
    return directory


def source(directory: Path, text: str, **fields: Any) -> ModelSource:
    return ModelSource("m", 1, directory, normalise(parse(f'name: "m" backend: "dali" {text}')), **fields)


def spec(of: ModelSource) -> InstanceSpec:
    return InstanceSpec("m_0", "CPU", -1, of, ModelInterface.of(of.config))


def alone(file: bytes) -> np.ndarray:
    """What DALI answers without a server."""
    pipeline = thumbnails()
    pipeline.build()
    pipeline.feed_input("DALI_INPUT_0", [np.frombuffer(file, np.uint8)])
    return np.array(pipeline.run()[0].at(0))


def rows(*files: bytes) -> np.ndarray:
    found = np.empty((len(files), 1), np.object_)
    found[:, 0] = files
    return found


def broken(file: bytes) -> bytes:
    return b"\xff\xd8 no picture" + file[200:400]


def request(**arrays: np.ndarray) -> ModelRequest:
    return ModelRequest("", 0, [Tensor.of(name, array) for name, array in arrays.items()], (), {})


async def run(instance: Any, *requests: ModelRequest) -> list[np.ndarray | CharoniaError]:
    answers = await instance.execute_requests(requests)
    return [answer.error or answer.outputs[0].array() for answer in answers]


def test_it_is_installed_as_a_distribution_of_its_own() -> None:
    (entry,) = metadata.entry_points(group=ENTRY_POINT_GROUP, name="dali")
    assert entry.dist is not None
    assert entry.dist.name == "charonia-dali"
    assert entry.load().isolation == "sandbox"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_it_keeps_the_contract(check: Check, tmp_path: Path) -> None:
    china, flower = CHINA.read_bytes(), FLOWER.read_bytes()
    model = ReferenceModel.of(
        saved(tmp_path / "m", thumbnails()),
        BYTES,
        expected=lambda inputs: {"DALI_OUTPUT_0": np.stack([alone(one) for one in inputs["DALI_INPUT_0"].flat])},
        requests=[{"DALI_INPUT_0": rows(china, flower)}, {"DALI_INPUT_0": rows(flower)}],
        failing={"DALI_INPUT_0": rows(china, broken(china))},
    )
    await check(BackendRegistry().get("dali"), model)


async def test_a_broken_picture_fails_alone_and_ends_nothing(tmp_path: Path) -> None:
    instance = await instance_of(DaliBackend(), spec(source(saved(tmp_path, thumbnails()), BYTES)))
    china, flower = CHINA.read_bytes(), FLOWER.read_bytes()
    files = [china, broken(china), flower, b"", b"text", china[: len(china) // 50]]
    for order in (files, files[::-1], [china], files):
        answers = await run(instance, *(request(DALI_INPUT_0=rows(file)) for file in order))
        for file, answer in zip(order, answers, strict=True):
            if file in (china, flower):
                assert isinstance(answer, np.ndarray)
                assert np.array_equal(answer[0], alone(file))
            else:
                assert isinstance(answer, InternalError)
                assert answer.message.startswith("DALI: ")
                assert "/" not in answer.message, "neither paths nor lines of the program"
    await instance.close_instance()


async def test_files_of_several_lengths_as_bytes_of_numbers(tmp_path: Path) -> None:
    """As clients of Triton send them: a row is UINT8, and the rows of one request are filled up with zeros."""
    instance = await instance_of(DaliBackend(), spec(source(saved(tmp_path, thumbnails()), UINT8)))
    china, flower = (np.fromfile(path, np.uint8) for path in (CHINA, FLOWER))
    padded = np.zeros((2, max(len(china), len(flower))), np.uint8)
    padded[0, : len(china)], padded[1, : len(flower)] = china, flower
    together = request(DALI_INPUT_0=padded)
    answers = await run(instance, together, request(DALI_INPUT_0=flower[None]), request(DALI_INPUT_0=china[None]))
    wanted = [alone(path.read_bytes()) for path in (CHINA, FLOWER)]
    assert np.array_equal(answers[0], np.stack(wanted))
    assert np.array_equal(answers[1], wanted[1:])
    assert np.array_equal(answers[2], wanted[:1])
    await instance.close_instance()


async def test_pixels_are_those_of_pillow_whatever_the_size(tmp_path: Path) -> None:
    text = """
    max_batch_size: 4 input { name: "FILE" data_type: TYPE_STRING dims: 1 }
    output { name: "PIXELS" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }
    """
    instance = await instance_of(DaliBackend(), spec(source(saved(tmp_path, pixels()), text)))
    small = io.BytesIO()
    Image.open(FLOWER).resize((50, 40)).save(small, "JPEG")
    files = [CHINA.read_bytes(), small.getvalue()]
    answers = await run(instance, *(request(FILE=rows(file)) for file in files))
    for file, answer in zip(files, answers, strict=True):
        assert isinstance(answer, np.ndarray)
        wanted = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int)
        assert answer.shape == (1, *wanted.shape)
        assert np.abs(answer[0] - wanted).mean() < 0.5
    (mixed,) = await run(instance, request(FILE=rows(*files)))
    assert isinstance(mixed, InternalError)
    assert "have different shapes, (40, 50, 3) and (427, 640, 3): send them as requests of their own" in mixed.message
    await instance.close_instance()


async def test_outputs_that_are_split_along_their_outer_axis(tmp_path: Path) -> None:
    text = """
    max_batch_size: 4 input { name: "VIDEO" data_type: TYPE_FP32 dims: [ -1, 2 ] allow_ragged_batch: true }
    output { name: "FRAMES" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "SUM" data_type: TYPE_FP32 dims: [ ] }
    """.replace("dims: [ ]", "dims: [ 1 ] reshape { }")
    split = 'parameters { key: "split_along_outer_axis" value { string_value: "FRAMES" } }'
    instance = await instance_of(DaliBackend(), spec(source(saved(tmp_path, frames()), text + split)))
    videos = [np.arange(6, dtype=np.float32).reshape(1, 3, 2), np.ones((2, 2, 2), np.float32)]
    answers = await instance.execute_requests([request(VIDEO=video) for video in videos])
    for video, answer in zip(videos, answers, strict=True):
        found = {tensor.name: tensor.array() for tensor in answer.outputs}
        assert np.array_equal(found["FRAMES"], video.reshape(-1, 2) * 2)
        assert np.array_equal(found["SUM"], video.sum(axis=(1, 2)))
    await instance.close_instance()
    with pytest.raises(InvalidArgument, match="'split_along_outer_axis' of 'm' names OTHER"):
        await instance_of(DaliBackend(), spec(source(tmp_path, text + split.replace('"FRAMES"', '"FRAMES:OTHER"'))))


async def test_a_configuration_is_completed_from_what_the_pipeline_declares(tmp_path: Path) -> None:
    of = source(saved(tmp_path / "m", thumbnails()), "max_batch_size: 8")
    found = await signature_of(DaliBackend(), of)
    assert found.inputs == (TensorSignature("DALI_INPUT_0", "UINT8", (-1, -1)),)
    (output,) = found.outputs
    assert (output.datatype, output.dims) == ("FP32", (-1, -1, -1, -1))
    config = from_graph(
        source(tmp_path / "m", BYTES).config, await signature_of(DaliBackend(), source(tmp_path / "m", BYTES))
    )
    assert config == source(tmp_path / "m", BYTES).config
    assert await signature_of(DaliBackend(), source(saved(tmp_path / "open", pixels()), "max_batch_size: 8")) is None


async def error_of(of: ModelSource) -> CharoniaError:
    with pytest.raises(CharoniaError) as caught:
        await instance_of(DaliBackend(), spec(of))
    return caught.value


async def test_files_and_configurations_that_are_wrong(tmp_path: Path) -> None:
    good = saved(tmp_path / "good", thumbnails())
    assert isinstance(await error_of(source(tmp_path, BYTES)), NotFound)
    error = await error_of(source(good, BYTES + 'default_model_filename: "../../x"'))
    assert "outside the version directory" in error.message
    error = await error_of(source(good, BYTES.replace("DALI_INPUT_0", "OTHER")))
    assert "has no input 'OTHER', it has ['DALI_INPUT_0']" in error.message
    error = await error_of(source(good, BYTES + 'output { name: "MORE" data_type: TYPE_FP32 dims: 1 }'))
    assert "has 1 outputs, the configuration 2" in error.message
    whole = (good / "1" / "model.dali").read_bytes()
    for number, junk in enumerate((b"", b"junk", whole[:100], zlib.compress(whole), bytes(64))):
        (tmp_path / f"{number}" / "1").mkdir(parents=True)
        (tmp_path / f"{number}" / "1" / "model.dali").write_bytes(junk)
        error = await error_of(source(tmp_path / f"{number}", BYTES))
        assert error.message == "'model.dali' of model 'm' is no DALI pipeline"


def test_described_takes_any_bytes() -> None:
    whole = content(thumbnails())
    assert [one.name for one in described(whole)[0]] == ["DALI_INPUT_0"]
    random = np.random.default_rng(7)
    for _ in range(300):
        changed = bytearray(whole[: random.integers(1, len(whole))])
        for place in random.integers(0, len(changed), 5):
            changed[place] = random.integers(256)
        try:
            described(bytes(changed))
        except (AttributeError, TypeError, ValueError):
            pass  # what the model makes an InvalidArgument of


async def test_a_program_needs_leave_and_makes_its_pipeline(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "dali.py").write_text(PROGRAM)
    text = """
    max_batch_size: 4 input { name: "NUMBERS" data_type: TYPE_FP32 dims: -1 }
    output { name: "DOUBLED" data_type: TYPE_FP32 dims: -1 }
    """
    error = await error_of(source(tmp_path, text))
    assert isinstance(error, Unsupported)
    assert "brings machine code: the program 'dali.py'" in error.message
    instance = await instance_of(DaliBackend(), spec(source(tmp_path, text, native_code=True)))
    numbers = np.arange(8, dtype=np.float32).reshape(4, 2)
    (answer,) = await run(instance, request(NUMBERS=numbers))
    assert np.array_equal(answer, numbers * 2)
    await instance.close_instance()
    for program, said in (
        (PROGRAM.replace("@autoserialize", ""), "must have one pipeline with @autoserialize, it has 0"),
        ("raise ValueError('not today')", "'dali.py' of model 'm': not today"),
    ):
        (tmp_path / "1" / "dali.py").write_text(program)
        assert said in (await error_of(source(tmp_path, text, native_code=True))).message


async def test_a_pipeline_that_was_made_for_a_gpu_and_needs_none(tmp_path: Path) -> None:
    """The file of a machine with a GPU says device 0; instances on CPUs say that there is none."""
    saved(tmp_path, thumbnails())
    path = tmp_path / "1" / "model.dali"
    path.write_bytes(path.read_bytes() + b"\x40\x00")
    instance = await instance_of(DaliBackend(), spec(source(tmp_path, BYTES)))
    (answer,) = await run(instance, request(DALI_INPUT_0=rows(CHINA.read_bytes())))
    assert np.array_equal(answer, alone(CHINA.read_bytes())[None])
    await instance.close_instance()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("dali") / "models"
    for name, text in (("named", BYTES), ("numbers", UINT8), ("completed", "max_batch_size: 4")):
        (saved(models / name, thumbnails()) / "config.pbtxt").write_text(f'backend: "dali" {text}')
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_bytes(b"secret")
    for name in ("sandbox", "process"):
        (saved(models / f"reads_{name}", reading(secret)) / "config.pbtxt").write_text(
            'backend: "dali" max_batch_size: 1 input { name: "ASKED" data_type: TYPE_FP32 dims: 1 } '
            'output { name: "FOUND" data_type: TYPE_UINT8 dims: -1 } output { name: "E" data_type: TYPE_FP32 dims: 1 } '
            f'parameters {{ key: "charonia.isolation" value {{ string_value: "{name}" }} }}'
        )
    (models / "program" / "1").mkdir(parents=True)
    (models / "program" / "1" / "dali.py").write_text(PROGRAM)
    (models / "program" / "config.pbtxt").write_text(
        'max_batch_size: 4 input { name: "NUMBERS" data_type: TYPE_FP32 dims: -1 }'
        'output { name: "DOUBLED" data_type: TYPE_FP32 dims: -1 }'
    )
    with serving(models, tmp_path_factory.mktemp("state"), f"--allow-native-models={models}") as running:
        yield running


def asked(server: Any, model: str, array: np.ndarray, datatype: str, over: Any = client) -> np.ndarray:
    where = server.http if over is client else server.grpc
    with over.InferenceServerClient(where) as connection:
        config = (
            connection.get_model_config(model) if over is client else connection.get_model_config(model, as_json=True)
        )
        config = config.get("config", config)
        tensor = over.InferInput(config["input"][0]["name"], list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        found = connection.infer(model, [tensor]).as_numpy(config["output"][0]["name"])
        assert found is not None
        return found


@pytest.mark.parametrize("over", [client, grpc], ids=["http", "grpc"])
def test_pictures_are_served_beside_broken_ones(server: Any, over: Any) -> None:
    china, flower = CHINA.read_bytes(), FLOWER.read_bytes()
    files = [china, flower, broken(china), china, b"text", flower, china, broken(flower)]

    def one(model: str, file: bytes) -> np.ndarray | str:
        try:
            if model == "named":
                return asked(server, model, rows(file), "BYTES", over)[0]
            return asked(server, model, np.frombuffer(file, np.uint8)[None], "UINT8", over)[0]
        except InferenceServerException as error:
            return str(error)

    wanted = {file: alone(file) for file in (china, flower)}
    for model in ("named", "numbers"):
        with ThreadPoolExecutor(len(files)) as pool:
            answers = list(pool.map(one, [model] * len(files), files))
        for file, answer in zip(files, answers, strict=True):
            if file in wanted:
                assert isinstance(answer, np.ndarray), answer
                assert np.array_equal(answer, wanted[file])
            else:
                assert isinstance(answer, str)
                assert "DALI: nvidia.dali.fn.decoders.image: " in answer


def test_models_are_found_by_their_files_and_run_in_a_sandbox(server: Any) -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(asked(server, "program", numbers, "FP32"), numbers * 2)
    with client.InferenceServerClient(server.http) as connection:
        configs = {name: connection.get_model_config(name) for name in ("program", "completed")}
        batches = connection.get_inference_statistics("numbers")["model_stats"][0]["batch_stats"]
    assert configs["program"]["backend"] == "dali"
    for config in configs.values():
        assert config["parameters"]["charonia.isolation"]["string_value"] in ("sandbox", "process")
    (given,) = configs["completed"]["input"]
    assert (given["name"], given["data_type"], given["dims"]) == ("DALI_INPUT_0", "TYPE_UINT8", [-1])
    assert [one["batch_size"] for one in batches] == [8], "files of several lengths share a batch"


def test_a_pipeline_reads_files_only_where_it_is_trusted(server: Any) -> None:
    one = np.ones((1, 1), np.float32)
    assert asked(server, "reads_process", one, "FP32").tobytes() == b"secret"
    with client.InferenceServerClient(server.http) as connection:
        config = connection.get_model_config("reads_sandbox")
    if config["parameters"]["charonia.isolation"]["string_value"] != "sandbox":
        pytest.skip("this kernel has no sandbox")
    with pytest.raises(InferenceServerException, match=r"DALI: nvidia\.dali\.fn\.readers\.file: "):
        asked(server, "reads_sandbox", one, "FP32")


def test_reason_leaves_programs_out() -> None:
    text = """Critical error in pipeline:
Error in CPU operator `nvidia.dali.fn.decoders.image`,
which was used in the pipeline definition with the following traceback:

  File "/home/somebody/secret.py", line 15, in pipe
    im=fn.decoders.image(e)

encountered:

nvImageCodec failure: '#4'
Current pipeline object is no longer valid."""
    assert charonia_dali.reason(RuntimeError(text)) == "nvidia.dali.fn.decoders.image: nvImageCodec failure: '#4'"
