"""The commands that ask a server: what stands on the command line as arrays, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia import cli
from charonia.client import Client
from charonia.client_commands import array_of, parser
from charonia.errors import InvalidArgument
from charonia.operations import arguments


@pytest.mark.parametrize(
    ("text", "datatype", "shape", "expected"),
    [
        ("3", "INT32", [1], np.array([3], np.int32)),
        ("3", "INT32", [-1, 1], np.array([[3]], np.int32)),
        ("[1, 2]", "FP32", [-1, 2], np.array([[1, 2]], np.float32)),
        ("[1, 2, 3, 4]", "FP32", [-1, 2], np.array([[1, 2], [3, 4]], np.float32)),
        ("[1, 2, 3]", "INT64", [-1, -1], np.array([[1, 2, 3]], np.int64)),
        ("[[1.5, 2]]", "FP16", [-1, -1], np.array([[1.5, 2]], np.float16)),
        ("[true, false]", "BOOL", [2], np.array([True, False])),
        ("255", "UINT8", [1], np.array([255], np.uint8)),
        ("18446744073709551615", "UINT64", [1], np.array([2**64 - 1], np.uint64)),
        ("text", "BYTES", [-1, 1], np.array([["text"]], np.object_)),
        ("5", "BYTES", [1], np.array(["5"], np.object_)),
        ('["a", "b"]', "BYTES", [-1], np.array(["a", "b"], np.object_)),
        ("[[1, 2]]", "INT8", None, np.array([[1, 2]], np.int8)),
    ],
)
def test_values(text: str, datatype: str, shape: list[int] | None, expected: np.ndarray[Any, Any]) -> None:
    array = array_of("X", text, datatype, shape)
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    assert array.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("text", "datatype", "shape"),
    [
        ("1.5", "INT32", [1]),
        ("300", "UINT8", [1]),
        ("-1", "UINT8", [1]),
        ("1", "BOOL", [1]),
        ('"a"', "FP32", [1]),
        ("[1, 2, 3]", "FP32", [-1, 2]),
        ("[[1], [2, 3]]", "FP32", [-1, -1]),
        ("[1, 2", "FP32", [-1]),
        ("one", "FP32", [-1]),
        ('["a", "b"', "BYTES", [-1]),
        ("@/nowhere/file", "BYTES", [1]),
        ("@/nowhere/file.npy", "FP32", [1]),
        ("1", "INT33", [1]),
    ],
)
def test_values_that_do_not_fit(text: str, datatype: str, shape: list[int]) -> None:
    with pytest.raises(InvalidArgument):
        array_of("X", text, datatype, shape)


def test_files(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    np.save(tmp_path / "x.npy", array)
    assert array_of("X", f"@{tmp_path}/x.npy", "INT16", [-1, 3]).tolist() == array.tolist()
    (tmp_path / "page.png").write_bytes(b"\x89PNG\0")
    assert array_of("X", f"@{tmp_path}/page.png", "BYTES", [-1, 1]).tolist() == [[b"\x89PNG\0"]]
    np.save(tmp_path / "pickled.npy", np.array([{}], np.object_), allow_pickle=True)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        array_of("X", f"@{tmp_path}/pickled.npy", "BYTES", [1])


@pytest.mark.parametrize(
    "line", ["infer", "result", "tail", "models extra", "infer m --unknown", "infer m --timeout x"]
)
def test_wrong_usage_is_exit_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 2
    assert "usage: charonia" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("models --url ftp://host", "is no server"),
        ("models --url http://host:x", "is no server"),
        ("models --url unix:///run/http.sock", "names no protocol: write http+unix:///PATH or grpc+unix:///PATH"),
        ("models --url http+unix://run/http.sock", "names no Unix socket: write http+unix:///PATH"),
        ("models --url http+unix:/run/http.sock", "names no Unix socket: write http+unix:///PATH"),
        ("models --url http+unix:run/http.sock", "names no Unix socket: write http+unix:///PATH"),
        ("models --url grpc+unix:/run/grpc.sock", "names no Unix socket: write grpc+unix:///PATH"),
        ("models --url unix:/run/http.sock", "names no protocol: write http+unix:///PATH or grpc+unix:///PATH"),
        ("models --url http:/host:8000", "'http:/host:8000' is no server: write http://HOST:PORT or grpc://HOST:PORT"),
        ("models --url grpcs:/host", "'grpcs:/host' is no server: write http://HOST:PORT or grpc://HOST:PORT"),
        ("models --url grpc+unix:///", "names no Unix socket: write grpc+unix:///PATH"),
        ("models --url grpc+unix:///run/%00", "names no Unix socket"),
        ("models --url http://me:s/cret@host:8000", "'http://***@host:8000' is no server: its user or password holds"),
        ("models --url me:secret@host:x", "'***@host:x' is no server: Port could not be cast to integer value as 'x'"),
        ("models --url ftp://me:secret@host", "'ftp://***@host' is no server: write "),
        ("models --url unix://me:secret@/run/http.sock", "'unix://***@/run/http.sock' names no protocol"),
        ("models --url http+unix://me:secret@/run/http.sock", "'http+unix://***@/run/http.sock' names no Unix socket"),
        (
            "models --url grpc://me:secret@127.0.0.1:1",
            "'grpc://***@127.0.0.1:1' names a user, which gRPC does not send",
        ),
        ("models --header X", "--header 'X' is not NAME:VALUE"),
        ("infer m --input X --url 127.0.0.1:1", "--input 'X' is not NAME=VALUE"),
        ("health --url 127.0.0.1:1", "cannot be reached"),
    ],
)
def test_what_fails_is_one_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("charonia: ")
    assert sentence in error
    assert "cret" not in error
    assert len(error.splitlines()) == 1


def test_a_host_may_be_named_as_a_scheme_is() -> None:
    with Client("grpc:8001") as client:
        assert (client.url, client.is_grpc) == ("http://grpc:8001", False)


def test_every_command_has_help_and_is_offered_for_completion(capsys: pytest.CaptureFixture[str]) -> None:
    offered = arguments.words(parser())
    assert set(offered) == {"infer", "submit", "result", "tail", "models", "stats", "health"}
    assert not set(offered) & set(arguments.words(arguments.parser()))
    assert cli.main(["completion"]) == 0
    script = capsys.readouterr().out
    for command, flags in offered.items():
        assert {"--url", "--json", "--header"} <= set(flags[""])
        assert f"{command})" in script
        assert cli.main([command, "--help"]) == 0
    capsys.readouterr()
    cli.main(["--help"])
    usage = capsys.readouterr().out
    assert all(command in usage for command in offered)


def test_importing_the_client_loads_no_library_that_serves_or_connects() -> None:
    """A transport is loaded when a client first needs it."""
    heavy = "{'grpc', 'httpx2', 'torch', 'onnxruntime', 'redis', 'fastapi', 'google.protobuf', 'asyncio'}"
    program = f"import sys, charonia.client; print(sorted({heavy} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said.strip() == "[]"
