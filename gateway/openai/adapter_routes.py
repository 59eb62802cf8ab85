"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's form: a model is loaded again with other adapters.

What was asked for stands in the parameter `charonia.adapter_changes` of the configuration that the model is loaded
with, as a load of the repository extension may give one: so every executor does it, and texts that are being generated
go on. The executors need `--model-control-mode=explicit`; `model-repository` restricts both paths.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from charonia.generation.text_tensors import ADAPTERS_PARAMETER, ASSETS_PARAMETER
from charonia.models.config_forms import to_json
from charonia.tasks import Tasks
from gateway.handler import Handler
from protos.model_config_pb2 import ModelConfig

from .api_calls import ApiCall, RouteTable
from .shapes.api_errors import MODEL_NOT_FOUND, ApiError
from .shapes.sampling_fields import flag, text
from .text_models import TextModel, TextModels

CHANGES_PARAMETER = "charonia.adapter_changes"
"""A JSON object for the `llm` backend: names of adapters and their directories, null for one that is not served."""
GROUP = "model-repository"
_BACKEND = "llm"
_MAX_NAME, _MAX_PATH = 128, 4096


def add_adapters(routes: RouteTable, handler: Handler, models: TextModels, changes: Tasks) -> None:
    """Add the paths of this module. `changes` has the change that runs, and nothing else."""
    changing = asyncio.Lock()  # a change is made to what the one before it left

    async def change(model: TextModel, adapter: str, path: str | None) -> None:
        """Under the lock. A client that leaves does not end the change, as the executors would make it all the same."""
        if not handler.loads_by_call():
            raise ApiError("Adapters are loaded and unloaded with --model-control-mode=explicit only")
        task = changes.spawn(handler.load_model(model.name, changed(model, adapter, path), {}), "adapter-change")
        await asyncio.shield(task)

    async def load(call: ApiCall) -> None:
        body = await call.json()
        name, path = _text(body, "lora_name", _MAX_NAME), _text(body, "lora_path", _MAX_PATH)
        in_place = flag(body, "load_inplace")
        async with changing:
            await changes.settled()  # one whose client has left
            model, adapter = _target(body, name, models)
            if adapter in model.adapters and not in_place:
                raise ApiError(
                    f"The lora adapter '{adapter}' has already been loaded. If you want to load the adapter in place, "
                    "set 'load_inplace' to True.",
                    param="lora_name",
                )
            await change(model, adapter, path)
        await _said(call, f"Success: LoRA adapter '{adapter}' added successfully.")

    async def unload(call: ApiCall) -> None:
        body = await call.json()
        name = _text(body, "lora_name", _MAX_NAME)
        async with changing:
            await changes.settled()
            model, adapter = _target(body, name, models, is_known=True)
            if adapter not in model.adapters:
                raise ApiError(f"The lora adapter '{adapter}' cannot be found.", status=404, param="lora_name")
            await change(model, adapter, None)
        await _said(call, f"Success: LoRA adapter '{adapter}' removed successfully.")

    routes.add("POST", "/v1/load_lora_adapter", load, group=GROUP)
    routes.add("POST", "/v1/unload_lora_adapter", unload, group=GROUP)


def _text(body: dict[str, Any], name: str, most: int) -> str:
    found = text(body, name)
    if len(found) > most or not found.isprintable():
        raise ApiError(f"'{name}' must be printable, and at most {most} characters", param=name)
    return found


def _target(body: dict[str, Any], name: str, models: TextModels, *, is_known: bool = False) -> tuple[TextModel, str]:
    """The model and the adapter's own name. The model is named in `model`, or before the separator, or it is the only
    one: that takes adapters, or that has this one if `is_known`.
    """
    if body.get("model") is not None:
        found = models.find(text(body, "model"))
    elif models.separator and models.separator in name:
        base, _, name = name.rpartition(models.separator)
        found = models.find(base)
    else:
        takes = [model for model in models.all() if model.served.interface.backend == _BACKEND]
        takes = [model for model in takes if name in model.adapters] or takes if is_known else takes
        if not takes:
            raise ApiError("no model here takes adapters", status=404, param="model", code=MODEL_NOT_FOUND)
        if len(takes) > 1:
            names = ", ".join(model.name for model in takes)
            raise ApiError(f"'model' must say which of {names} is meant", param="model")
        (found,) = takes
    if found.served.interface.backend != _BACKEND:
        raise ApiError(
            f"The model '{found.name}' takes no adapters at run time: only the backend llm does", param="model"
        )
    if not name or name in (".", "..") or "/" in name or "," in name:
        raise ApiError("'lora_name' must be a name without '/' and ','", param="lora_name")
    return TextModel(found.served), name


def changed(model: TextModel, adapter: str, path: str | None) -> str:
    """The configuration to load, as JSON, with an adapter at a directory or, for None, without it."""
    wanted = ModelConfig()
    wanted.CopyFrom(model.served.config)
    said = wanted.parameters[CHANGES_PARAMETER].string_value
    changes = orjson.loads(said) if said else {}
    changes[adapter] = path
    wanted.parameters[CHANGES_PARAMETER].string_value = orjson.dumps(changes, option=orjson.OPT_SORT_KEYS).decode()
    names = [name for name in model.adapters if name != adapter] + ([adapter] if path is not None else [])
    wanted.parameters[ADAPTERS_PARAMETER].string_value = orjson.dumps(names).decode()
    if ASSETS_PARAMETER in wanted.parameters:
        del wanted.parameters[ASSETS_PARAMETER]  # the executor says it
    return orjson.dumps(to_json(wanted)).decode()


async def _said(call: ApiCall, message: str) -> None:
    await call.reply_bytes(message.encode(), headers=[(b"content-type", b"text/plain; charset=utf-8")])
