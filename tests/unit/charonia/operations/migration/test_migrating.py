"""`charonia migrate`: what it makes of other servers' files, what it says does not map, and what it refuses."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from charonia.cli import main
from charonia.errors import InvalidArgument
from charonia.operations.migration import archives
from charonia.operations.migration.archives import read_archive
from charonia.operations.migration.migrating import migrate
from protos.model_config_pb2 import ModelConfig

ARRAY = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
MLSERVER = {
    "name": "iris",
    "implementation": "mlserver_sklearn.SKLearnModel",
    "max_batch_size": 16,
    "max_batch_time": 0.005,
    "inputs": [{**ARRAY, "parameters": {"content_type": "np"}}],
    "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1]}],
    "parameters": {"uri": "./model.joblib", "version": "v0.1.0", "content_type": "np"},
    "warm_workers": True,
}
BENTO = """
import bentoml, numpy as np
from typing import Annotated, AsyncGenerator
from bentoml.validators import DType, Shape
open("ran", "w")

@bentoml.service(resources={"gpu": 1, "memory": "4Gi"}, traffic={"timeout": 60}, workers=2)
class Iris:
    def __init__(self) -> None:
        self.model = None

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=100)
    def classify(self, rows: Annotated[np.ndarray, Shape((-1, 4)), DType("float32")]) -> np.ndarray:
        return rows

    @bentoml.api
    async def talk(self, text: str, top: int = 3, image: "Path" = None) -> AsyncGenerator[str, None]:
        yield text

    def helper(self) -> None: ...
"""
KSERVE = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: custom}
spec:
  transformer: {}
  predictor:
    minReplicas: 2
    containerConcurrency: 3
    containers:
      - name: kserve-container
        image: me/custom:1
        env: [{name: A, value: b}]
        resources: {limits: {nvidia.com/gpu: "1", memory: 2Gi}}
---
kind: InferenceService
metadata: {name: ready}
spec: {predictor: {model: {modelFormat: {name: sklearn}, storageUri: "gs://b/m"}}}
"""
MANIFEST = {
    "runtime": "python",
    "model": {"modelName": "digits", "serializedFile": "w.pt", "handler": "image_classifier", "modelFile": "model.py",
              "modelVersion": "2.0", "configFile": "model-config.yaml", "requirementsFile": "requirements.txt"},
}  # fmt: skip


def graph() -> bytes:
    made = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["c"])],
        "g",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ("n", 4))],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, ("n", 4))],
    )
    return bytes(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    )


def mar(path: Path, manifest: dict[str, Any], files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def configs(repository: Path) -> dict[str, ModelConfig]:
    return {
        path.parent.name: text_format.Parse(path.read_text(), ModelConfig())
        for path in repository.glob("*/config.pbtxt")
    }


def unmapped(document: dict[str, Any], model: str) -> dict[str, str]:
    (found,) = [one for one in document["models"] if one["model"] == model]
    return {one["field"]: one["why"] for one in found["unmapped"]}


def test_mlserver(tmp_path: Path) -> None:
    (tmp_path / "iris").mkdir()
    (tmp_path / "iris/model-settings.json").write_text(json.dumps(MLSERVER))
    (tmp_path / "iris/model.joblib").write_bytes(b"weights")
    (tmp_path / "settings.json").write_text('{"parallel_workers": 3, "http_port": 9}')
    document = migrate(tmp_path, "", tmp_path / "models")
    assert document["kind"] == "mlserver"
    config = configs(tmp_path / "models")["iris"]
    assert (config.backend, config.max_batch_size) == ("python", 16)
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000
    assert config.instance_group[0].count == 3
    assert [(item.name, list(item.dims)) for item in config.input] == [("x", [4])]
    assert [(item.name, list(item.dims)) for item in config.output] == [("y", [1])]
    assert (tmp_path / "models/iris/1/model.joblib").read_bytes() == b"weights"
    fields = unmapped(document, "iris")
    assert {"parameters.version", "implementation", "warm_workers", "settings.json: http_port"} <= set(fields)
    assert {"inputs.x.parameters", "outputs.y.shape", "parameters.content_type"} <= set(fields)


def test_settings_that_cannot_be_read_keep_no_other_model_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {
        "broken": "{",
        "nameless": '{"name": "///"}',
        "sized": json.dumps({**MLSERVER, "name": "sized", "max_batch_size": "many"}),
        "typed": json.dumps({"name": "typed", "inputs": [{**ARRAY, "datatype": "FLOAT"}]}),
        "workers": '{"name": "workers"}',
    }
    for name, text in {**bad, "iris": json.dumps(MLSERVER), "zoo": '{"name": "zoo"}'}.items():
        (tmp_path / "all" / name).mkdir(parents=True)
        (tmp_path / "all" / name / "model-settings.json").write_text(text)
    (tmp_path / "all/workers/settings.json").write_text('{"parallel_workers": "all"}')
    assert main(["migrate", str(tmp_path / "all"), "--to", str(tmp_path / "models"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in document["models"]] == ["iris", "zoo"]
    assert sorted(configs(tmp_path / "models")) == ["iris", "zoo"]
    refused = {Path(one["file"]).parent.name: one["problem"] for one in document["refused"]}
    assert list(refused) == list(bad)
    assert "is not JSON" in refused["broken"]
    assert "has no name" in refused["nameless"]
    assert refused["sized"] == "'max_batch_size' must be a number from 0 to 2147483647, got 'many'"
    assert "'inputs' has a tensor" in refused["typed"]
    assert "settings.json': 'parallel_workers' must be a number" in refused["workers"]
    assert main(["migrate", str(tmp_path / "all")]) == 1
    said = capsys.readouterr().out
    assert f"not migrated: {tmp_path}/all/sized/model-settings.json: 'max_batch_size' must be a number" in said
    assert "iris: from MLServer's model-settings.json" in said


def test_a_file_that_cannot_be_copied_keeps_no_other_model_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("iris", "zoo"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-settings.json").write_text(json.dumps({**MLSERVER, "name": name}))
        (tmp_path / name / "model.joblib").write_bytes(b"weights")
    copy = shutil.copyfile

    def copyfile(source: Path, target: Path) -> Any:
        if source.parent.name == "iris":
            raise PermissionError(13, "Permission denied", str(source))
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copyfile)  # the superuser may read every file
    document = migrate(tmp_path, "", tmp_path / "models")
    assert [model["model"] for model in document["models"]] == ["zoo"]
    assert os.listdir(tmp_path / "models") == ["zoo"]
    assert "Permission denied" in document["refused"][0]["problem"]


def test_one_service_that_cannot_be_read_keeps_no_other_back(tmp_path: Path) -> None:
    bad = "---\nkind: InferenceService\nmetadata: {name: neither}\nspec: {predictor: {}}\n"
    (tmp_path / "s.yaml").write_text(KSERVE + bad)
    document = migrate(tmp_path / "s.yaml", "", None)
    assert [model["model"] for model in document["models"]] == ["custom", "ready"]
    assert [one["file"] for one in document["refused"]] == ["s.yaml"]
    assert "'neither' has neither a model nor containers" in document["refused"][0]["problem"]
    (tmp_path / "service.py").write_bytes(
        BENTO_API % b"int"
        + b"    @bentoml.api(batchable=True, max_batch_size=-1)\n    def g(self, a: int) -> int: ...\n"
    )
    document = migrate(tmp_path / "service.py", "", None)
    assert [model["model"] for model in document["models"]] == ["A_f"]
    assert document["refused"][0]["problem"].startswith("A.g: 'max_batch_size' must be a number")


def test_bentoml_is_parsed_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.py").write_text(BENTO)
    (tmp_path / "bentofile.yaml").write_text('service: "service:Iris"\npython: {packages: [numpy]}\n')
    document = migrate(tmp_path, "", tmp_path / "models")
    assert not (tmp_path / "ran").exists()
    made = configs(tmp_path / "models")
    assert set(made) == {"Iris_classify", "Iris_talk"}
    batched, talk = made["Iris_classify"], made["Iris_talk"]
    assert (batched.max_batch_size, list(batched.input[0].dims)) == (32, [4])
    assert (batched.instance_group[0].count, batched.instance_group[0].kind) == (2, 1)
    assert [item.name for item in talk.input] == ["text", "top", "image"]
    assert talk.model_transaction_policy.decoupled
    assert "api(max_latency_ms=...)" in unmapped(document, "Iris_classify")
    assert {"image: Path", "service(traffic=...)", "resources.memory", "bentofile.yaml: python"} <= set(
        unmapped(document, "Iris_talk")
    )
    for model in document["models"]:
        assert any(step.endswith("its code is beside this file as bento_service.py") for step in model["fill_in"])


def test_torchserve(tmp_path: Path) -> None:
    config = b"batchSize: 8\nmaxBatchDelay: 50\nminWorkers: 2\nresponseTimeout: 120\n"
    files = {"w.pt": b"w", "model.py": b"class Net: ...", "requirements.txt": b"", "model-config.yaml": config}
    document = migrate(mar(tmp_path / "d.mar", MANIFEST, files), "", tmp_path / "models")
    made = configs(tmp_path / "models")["digits"]
    assert (made.max_batch_size, made.instance_group[0].count) == (8, 2)
    assert made.dynamic_batching.max_queue_delay_microseconds == 50_000
    assert "NotImplementedError" in (tmp_path / "models/digits/2/model.py").read_text()
    assert (tmp_path / "models/digits/2/original_model.py").read_text() == "class Net: ..."
    assert {"model.handler", "model.py", "model-config.yaml: responseTimeout"} <= set(unmapped(document, "digits"))
    assert os.listdir(tmp_path / "models") == ["digits"]


def test_an_onnx_model_is_served_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = {"model": {"modelName": "net", "serializedFile": "net.onnx", "modelVersion": "1.0"}}
    source = mar(tmp_path / "net.mar", manifest, {"net.onnx": graph()})
    assert main(["migrate", str(source), "--to", str(tmp_path / "models")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["net: from TorchServe's net.mar, backend onnxruntime", "    wrote config.pbtxt",
                         "    wrote 1/model.onnx"]  # fmt: skip
    assert main(["check", str(tmp_path / "models")]) == 0


def test_kserve(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(KSERVE)
    document = migrate(tmp_path / "service.yaml", "", tmp_path / "models")
    made = configs(tmp_path / "models")
    assert set(made) == {"custom", "ready"}
    assert (made["custom"].instance_group[0].count, made["custom"].instance_group[0].kind) == (3, 1)
    fields = unmapped(document, "custom")
    assert {"spec.transformer", "image", "containers.env", "spec.predictor.minReplicas"} <= set(fields)
    assert {"modelFormat", "storageUri"} <= set(unmapped(document, "ready"))


def test_code_and_directories_of_kserve_say_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import numpy\nfrom kserve import Model\n\n\nclass M(Model):\n    pass\n")
    with pytest.raises(InvalidArgument, match=r"^'model.py' is the code of a KServe predictor: name the YAML file"):
        migrate(tmp_path / "model.py", "", None)
    with pytest.raises(InvalidArgument, match=r"is a directory: name the YAML file that has the InferenceService$"):
        migrate(tmp_path, "kserve", None)


def test_a_skeleton_is_python_that_does_not_load_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the names are: nothing of the source becomes code."""
    hostile = {
        "name": "m",
        "implementation": '"""\nimport os\nx = """',
        "inputs": [{**ARRAY, "name": "');import os#\n"}],
    }
    (tmp_path / "model-settings.json").write_text(json.dumps(hostile))
    assert main(["migrate", str(tmp_path / "model-settings.json"), "--to", str(tmp_path / "models")]) == 0
    code = (tmp_path / "models/m/1/model.py").read_text()
    spaces: dict[str, Any] = {}
    body = code.replace("import triton_python_backend_utils as pb_utils", "pb_utils = None")
    exec(compile(body, "model.py", "exec"), spaces)
    assert "os" not in spaces
    with pytest.raises(NotImplementedError, match="fill in"):
        spaces["TritonPythonModel"]().initialize({})


def test_without_a_repository_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text(KSERVE)
    before = sorted(tmp_path.rglob("*"))
    assert main(["migrate", "--json", str(tmp_path / "s.yaml")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [model["model"] for model in document["models"]] == ["custom", "ready"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_that_is_there_stays_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(KSERVE)
    (tmp_path / "models/ready").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="has 'ready' already: nothing was written"):
        migrate(tmp_path / "s.yaml", "", tmp_path / "models")
    assert os.listdir(tmp_path / "models") == ["ready"]


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a\\..\\evil", "C:evil", ".."])
def test_names_that_lead_outside_an_archive_are_refused(name: str, tmp_path: Path) -> None:
    source = mar(tmp_path / "a.mar", MANIFEST, {name: b"x"})
    with pytest.raises(InvalidArgument, match="leads outside"):
        migrate(source, "", tmp_path / "models")
    assert not (tmp_path / "models").exists()
    assert sorted(os.listdir(tmp_path)) == ["a.mar"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_a_tar_are_refused(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("link")
        member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidArgument):
        read_archive(tmp_path / "a.tar.gz", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.mar", "w") as archive:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidArgument, match="link"):
        read_archive(tmp_path / "a.mar", tmp_path / "out")


def test_sizes_are_counted_while_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "a.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(10 << 20))
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidArgument, match="unpacks to more than 1048576 bytes"):
        read_archive(tmp_path / "a.mar", tmp_path / "out", max_bytes=1 << 20)
    assert (tmp_path / "out/zeros").stat().st_size <= 1 << 20
    monkeypatch.setattr(archives, "MAX_FILES", 2)
    many = mar(tmp_path / "b.mar", {}, {f"f{number}": b"" for number in range(3)})
    (tmp_path / "more").mkdir()
    with pytest.raises(InvalidArgument, match="more than 2 files"):
        read_archive(many, tmp_path / "more")


def test_what_shrinks_too_far_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_ALWAYS_BYTES", 1 << 20)
    bomb = tmp_path / "a.mar"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(8 << 20))
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidArgument, match="unpacks to more than 1048576 bytes"):
        read_archive(bomb, tmp_path / "out")


def test_headers_of_a_tar_are_bounded_and_directories_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tarfile` reads a header of any size into memory, and remembers every member."""
    monkeypatch.setattr(archives, "MAX_FILES", 2)
    header, directory = tarfile.TarInfo("x"), tarfile.TarInfo("d")
    header.type, header.size, directory.type = tarfile.XHDTYPE, 8 << 30, tarfile.DIRTYPE
    for name, content, said in (
        ("h", header.tobuf(tarfile.GNU_FORMAT), "has a header of"),
        ("d", directory.tobuf() * 3, "more than 2"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content))
        (tmp_path / f"{name}-out").mkdir()
        with pytest.raises(InvalidArgument, match=said):
            read_archive(tmp_path / name, tmp_path / f"{name}-out")


def test_a_type_without_pieces_and_sizes_out_of_range(tmp_path: Path) -> None:
    for returns in (b"Generator[()]", b"Annotated[np.ndarray, Shape((%d,))]" % 10**30):
        (tmp_path / "service.py").write_bytes(BENTO_API % returns)
        (model,) = migrate(tmp_path / "service.py", "", None)["models"]
        assert model["model"] == "A"


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


BENTO_API = b"""@bentoml.service
class A:
    @bentoml.api
    def f(self, a: int) -> %s: ...
"""
SOURCES: dict[str, tuple[str, bytes]] = {
    "no JSON": ("model-settings.json", b"{"),
    "a list": ("model-settings.json", b"[]"),
    "deep": ("model-settings.json", b"[" * 100_000),
    "a bad shape": ("model-settings.json", json.dumps({"name": "m", "inputs": [{**ARRAY, "shape": [0]}]}).encode()),
    "an odd shape": ("model-settings.json", json.dumps({"name": "m", "inputs": [{**ARRAY, "shape": ["²"]}]}).encode()),
    "a bad type": ("model-settings.json", json.dumps({"name": "m", "inputs": [{**ARRAY, "datatype": "X"}]}).encode()),
    "a bad size": ("model-settings.json", b'{"name": "m", "max_batch_size": -1}'),
    "not a number": ("model-settings.json", b'{"name": "m", "max_batch_size": NaN}'),
    "no name": ("model-settings.json", b'{"name": "///"}'),
    "no YAML": ("s.yaml", b"a: [b"),
    "an object of python": ("s.yaml", b"!!python/object/apply:os.system ['touch ran']"),
    "no service": ("s.yaml", b"kind: Pod"),
    "a number of 400 digits": ("model-settings.json", b'{"name": "m", "max_batch_size": 1%s}' % (b"0" * 400)),
    "half a surrogate pair": (
        "model-settings.json",
        rb'{"name": "m", "inputs": [{"name": "\ud800", "datatype": "FP32", "shape": [1]}]}',
    ),
    "a NUL in a path": ("model-settings.json", rb'{"name": "m", "parameters": {"uri": "a\u0000b"}}'),
    "an empty number": ("s.yaml", b"kind: !!int ''"),
    "a boolean that is none": ("s.yaml", b"kind: !!bool maybe"),
    "a time that is none": ("s.yaml", b"kind: !!timestamp soon"),
    "aliases of aliases": (
        "s.yaml",
        b"kind: InferenceService\na: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c + 1, c + 1, b", ".join([b"*%c" % c] * 10)) for c in range(97, 106))
        + b"spec: *j\n",
    ),
    "an alias of itself": ("s.yaml", b"kind: InferenceService\nspec: &x [*x]\n"),
    "operators without end": ("service.py", b"-" * 200_000 + b"1"),
    "types without end": ("service.py", BENTO_API % (b"x" + b".a" * 2000)),
    "a Triton repository": (
        "s.yaml",
        b"kind: InferenceService\nmetadata: {name: a}\nspec: {predictor: {model: {modelFormat: {name: triton}}}}",
    ),
    "no Python": ("service.py", b"def f(:"),
    "no API": ("service.py", b"x = 1"),
    "not UTF-8": ("service.py", b"\xff\xfe"),
    "no archive": ("a.mar", b"nothing"),
    "an empty archive": ("a.mar", b""),
    "unknown": ("a.txt", b""),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_that_cannot_be_read_are_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content = SOURCES[name]
    (tmp_path / file).write_bytes(content)
    assert main(["migrate", str(tmp_path / file), "--to", str(tmp_path / "models")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("charonia: ")
    assert "internal error" not in said
    assert said.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == [file]


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("MAR-INF/MANIFEST.json")
        content = os.urandom(100_000)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    (tmp_path / "a.mar").write_bytes(cut(buffer.getvalue()))
    with pytest.raises(InvalidArgument):
        migrate(tmp_path / "a.mar", "", tmp_path / "models")
    assert not (tmp_path / "models").exists()
