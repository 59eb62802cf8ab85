"""A plug-in of pytest for the tests of Triton's OpenAI frontend: where they start that, `charonia serve` is started.

Tests that use Triton's in-process server are skipped. Where the tests write a model for vLLM, the example's model is
served instead, with random adapters of the same names.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2
import openai

from loadtest.bench.servers import Charonia
from loadtest.clients.genai import weights_of
from loadtest.model import LoadTestError

from .running import SHORT_CONTEXT, options_of, write_model
from .stand_ins import stand_for

_SECONDS = 600
_OWN_PORT = ("--allow-openai=true", "--openai-port=0", "--openai-address=127.0.0.1")


class Served:
    """`charonia serve` of a repository, with the OpenAI API at a port of its own, and the options of `SUITE_SERVE`."""

    def __init__(self, repository: str, options: Sequence[str] = ()) -> None:
        self._server = Charonia(Path(repository), [*_OWN_PORT, *options, *shlex.split(os.environ["SUITE_SERVE"])])
        self._server.__enter__()
        self.url_root = f"http://{self._server.endpoints.openai}"

    def stop(self) -> None:
        self._server.__exit__(None, None, None)


class OpenAIServer:
    """Has the members of the tests' class of this name."""

    def __init__(self, cli_args: list[str], **_: Any) -> None:
        repository, options = options_of(cli_args)
        replace_models(Path(repository))
        try:
            self._served = Served(repository, options)
        except LoadTestError as error:
            raise RuntimeError(str(error)) from None
        self.url_root = self._served.url_root

    def __enter__(self) -> OpenAIServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._served.stop()

    def url_for(self, *parts: str) -> str:
        return self.url_root + "/" + "/".join(parts)

    def get_client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key="none", timeout=_SECONDS, max_retries=0)

    def get_async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="none", timeout=_SECONDS, max_retries=0)


def replace_models(repository: Path) -> None:
    """Write the example's model where one for vLLM is, with adapters of the names that `multi_lora.json` has."""
    weights = weights_of(Path(os.environ["TEST_MODEL_REPOSITORY"]))
    for written in repository.glob("*/1/model.json"):
        adapters = written.with_name("multi_lora.json")
        names = json.loads(adapters.read_bytes()) if adapters.exists() else ()
        written.unlink()
        write_model(written.parents[1], weights, SHORT_CONTEXT, list(names))


def setup_server(model_repository: str, model_control_mode: str = "none", load_models: Sequence[str] = ()) -> Served:
    """Starts what the tests ask through an application of FastAPI."""
    mode = [f"--model-control-mode={model_control_mode}"] if model_control_mode != "none" else []
    return Served(model_repository, [*mode, *(f"--load-model={name}" for name in load_models or ())])


def setup_fastapi_app(server: Served, **_: Any) -> str:
    """The address of the server: there is no application to be called."""
    return server.url_root


class TestClient(httpx2.Client):
    """Stands for FastAPI's, whose application is an address here."""

    __test__ = False

    def __init__(self, address: str) -> None:
        super().__init__(base_url=address, timeout=_SECONDS)


def _downloaded(**_: Any) -> None:
    """Downloads nothing: `replace_models` writes adapters."""


class _Mode:
    NONE, EXPLICIT = "none", "explicit"


sys.path.append(os.environ["SUITE_FRONTEND"])  # for the bound of a body, and the words of its refusal
stand_for(
    ("tritonserver", "huggingface_hub", "transformers", "vllm", "fastapi", "starlette", "uvicorn", "engine"),
    tests__utils={
        "OpenAIServer": OpenAIServer,
        "setup_server": setup_server,
        "setup_fastapi_app": setup_fastapi_app,
    },
    huggingface_hub={"snapshot_download": _downloaded},
    fastapi__testclient={"TestClient": TestClient},
    tritonserver={"ModelControlMode": _Mode, "Server": Served},
    frontend__fastapi__middleware__api_restriction={},
    openai_frontend__engine__utils__triton={},
)
