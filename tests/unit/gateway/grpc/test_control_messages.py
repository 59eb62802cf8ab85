"""G3, G10-G12, G16."""

from __future__ import annotations

from typing import Any

import pytest

from charonia.errors import InvalidArgument, Unsupported
from gateway.grpc import control_messages as control
from gateway.handler import (
    BatchStatistics,
    Duration,
    MemoryUsage,
    ModelIndexEntry,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)
from gateway.reports.log_settings import TYPES, LogSwitches
from protos import grpc_service_pb2 as pb


def test_server_metadata() -> None:
    message = control.server_metadata(ServerMetadata("triton", "2.0", ("a", "b")))
    assert message == pb.ServerMetadataResponse(name="triton", version="2.0", extensions=["a", "b"])


def test_model_metadata() -> None:
    message = control.model_metadata(
        ModelMetadata(
            "m", ("1", "3"), "p",
            (TensorMetadata("I", "FP32", (-1, 16)),),
            (TensorMetadata("O", "BYTES", ()), TensorMetadata("P", "BOOL", (2,))),
        )
    )  # fmt: skip
    tensor = pb.ModelMetadataResponse.TensorMetadata
    assert message == pb.ModelMetadataResponse(
        name="m", versions=["1", "3"], platform="p",
        inputs=[tensor(name="I", datatype="FP32", shape=[-1, 16])],
        outputs=[tensor(name="O", datatype="BYTES"), tensor(name="P", datatype="BOOL", shape=[2])],
    )  # fmt: skip


def test_statistics() -> None:
    durations = {
        name: Duration(number, number * 10)
        for number, name in enumerate(
            ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"),
            start=1,
        )
    }
    batch = BatchStatistics(4, Duration(1, 2), Duration(3, 4), Duration(5, 6))
    message = control.model_statistics([ModelStatistics("m", "2", 7, 8, 9, batches=(batch,), **durations)])  # type: ignore[arg-type]
    (found,) = message.model_stats
    assert (found.name, found.version) == ("m", "2")
    assert (found.last_inference, found.inference_count, found.execution_count) == (7, 8, 9)
    for name, duration in durations.items():
        written = getattr(found.inference_stats, name)
        assert (written.count, written.ns) == (duration.count, duration.ns)
    (row,) = found.batch_stats
    assert (row.batch_size, row.compute_input.ns, row.compute_infer.ns, row.compute_output.ns) == (4, 2, 4, 6)


def test_durations_of_zero_are_there() -> None:
    memory = (MemoryUsage("GPU", 1, 2**33),)
    (held,) = control.model_statistics([ModelStatistics("m", "1", memory=memory)]).model_stats
    assert [(one.type, one.id, one.byte_size) for one in held.memory_usage] == [("GPU", 1, 2**33)]
    (found,) = control.model_statistics([ModelStatistics("m", "1")]).model_stats
    for name in pb.InferStatistics.DESCRIPTOR.fields_by_name:
        assert found.inference_stats.HasField(name)


def test_index() -> None:
    message = control.repository_index(
        [ModelIndexEntry("m", "1", "READY"), ModelIndexEntry("n", "2", "UNAVAILABLE", "why")]
    )
    index = pb.RepositoryIndexResponse.ModelIndex
    assert message == pb.RepositoryIndexResponse(
        models=[
            index(name="m", version="1", state="READY"),
            index(name="n", version="2", state="UNAVAILABLE", reason="why"),
        ]
    )  # fmt: skip


def load(**parameters: pb.ModelRepositoryParameter) -> pb.RepositoryModelLoadRequest:
    return pb.RepositoryModelLoadRequest(model_name="m", parameters=parameters)


def test_loads() -> None:
    parameter = pb.ModelRepositoryParameter
    assert control.read_load(load()) == (None, {})
    message = load(
        config=parameter(string_param=""),
        **{"file:1/m": parameter(bytes_param=b"\0"), "file:": parameter(bytes_param=b"")},
    )
    assert control.read_load(message) == ("", {"1/m": b"\0", "": b""})


@pytest.mark.parametrize(
    ("key", "parameter", "message"),
    [
        ("config", {"bytes_param": b"{}"}, "invalid value type for load parameter 'config', expected string_param."),
        ("config", {}, "invalid value type for load parameter 'config', expected string_param."),
        ("file:1/m", {"string_param": "x"}, "invalid value type for load parameter 'file:1/m', expected bytes_param."),
        ("odd", {"string_param": "x"}, "unrecognized load parameter 'odd'."),
    ],
)
def test_loads_that_are_refused(key: str, parameter: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        control.read_load(load(**{key: pb.ModelRepositoryParameter(**parameter)}))
    assert caught.value.message == message


@pytest.mark.parametrize("wanted", [True, False])
def test_unloads(wanted: bool) -> None:
    parameters = {"unload_dependents": pb.ModelRepositoryParameter(bool_param=wanted)}
    assert control.read_unload(pb.RepositoryModelUnloadRequest(parameters=parameters)) is wanted
    assert control.read_unload(pb.RepositoryModelUnloadRequest()) is False


def test_unloads_that_are_refused() -> None:
    for key, text in (
        ("unload_dependents", "invalid value type for 'unload_dependents' parameter, expected bool_param."),
        ("odd", "unrecognized unload parameter 'odd'."),
    ):
        parameters = {key: pb.ModelRepositoryParameter(int64_param=1)}
        with pytest.raises(InvalidArgument) as caught:
            control.read_unload(pb.RepositoryModelUnloadRequest(parameters=parameters))
        assert caught.value.message == text


def log_request(**settings: dict[str, Any]) -> pb.LogSettingsRequest:
    return pb.LogSettingsRequest(settings={k: pb.LogSettingsRequest.SettingValue(**v) for k, v in settings.items()})


def test_log_settings_to_change() -> None:
    message = log_request(
        log_info={"bool_param": False}, log_verbose_level={"uint32_param": 2}, log_format={"string_param": "default"},
        odd={"uint32_param": 1},
    )  # fmt: skip
    assert control.read_log_settings(message) == {"log_info": False, "log_verbose_level": 2, "log_format": "default"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("log_info", {"uint32_param": 1}, "expect boolean for 'log_info'"),
        ("log_verbose_level", {"bool_param": True}, "expect int32 for 'log_verbose_level'"),
        ("log_format", {}, "expect string for 'log_format'"),
        ("log_format", {"string_param": "odd"}, "invalid argument for log_format, got: odd"),
    ],
)
def test_log_settings_of_another_type(key: str, value: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        control.read_log_settings(log_request(**{key: value}))
    assert caught.value.message == message


@pytest.mark.parametrize("value", [{"bool_param": True}, {"string_param": "x"}, {}])
def test_a_log_file_is_no_setting_to_change(value: dict[str, Any]) -> None:
    wanted = control.read_log_settings(log_request(log_file=value))
    with pytest.raises(Unsupported, match="log file location can not be updated through network protocol"):
        LogSwitches().changed(wanted)


def test_the_log_settings_answer_is_in_full() -> None:
    message = control.log_settings(LogSwitches(log_info=False, log_verbose_level=3))
    assert set(message.settings) == set(TYPES)
    assert message.settings["log_info"].WhichOneof("parameter_choice") == "bool_param"
    assert message.settings["log_info"].bool_param is False
    assert message.settings["log_verbose_level"].uint32_param == 3
    assert message.settings["log_format"].string_param == "default"
    assert message.settings["log_file"].WhichOneof("parameter_choice") == "string_param"
