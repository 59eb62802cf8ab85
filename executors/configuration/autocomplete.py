"""The changes that a python model's `auto_complete_config` may make to its configuration, and their errors (P2).

The functions change the JSON form of a configuration in place, in the model's own process, and raise `ValueError`, as
the model's author expects. `merge` copies the result into the written configuration, in the executor's process. Only
`merge` imports protobuf, because a model's environment may not have it (P18).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from charonia.models.config_errors import InstanceError

if TYPE_CHECKING:
    from protos.model_config_pb2 import ModelConfig

Document = dict[str, Any]

_DATA_TYPES = (
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
    "TYPE_BF16",
)
"""Triton's names of data types; the index is the enum value."""

_INPUT_KEYS = ("name", "data_type", "dims", "optional")
_OUTPUT_KEYS = ("name", "data_type", "dims")


def set_max_batch_size(config: Document, max_batch_size: int) -> None:
    """Set the size. Raises `ValueError` when a larger one is written."""
    written = int(config.get("max_batch_size", 0))
    if written <= max_batch_size:
        config["max_batch_size"] = max_batch_size
    else:
        raise ValueError(
            f"configuration specified max_batch_size {written}, but in auto-complete-config function for model "
            f"'{_name(config)}' specified max_batch_size {max_batch_size}"
        )


def set_dynamic_batching(config: Document) -> None:
    """Set dynamic batching. Raises `ValueError` when another scheduler is written."""
    for choice in ("sequence_batching", "ensemble_scheduling"):
        if choice in config:
            raise ValueError(
                f"Configuration specified scheduling_choice as '{choice}', but auto-complete-config function for "
                f"model '{_name(config)}' tries to set scheduling_choice as 'dynamic_batching'"
            )
    config.setdefault("dynamic_batching", {})


def set_model_transaction_policy(config: Document, policy: Document) -> None:
    """Set `{"decoupled": bool}` or `{}`. Raises `ValueError` for a different written policy, and any other key."""
    where = f"in auto-complete-config function for model '{_name(config)}'"
    if any(key != "decoupled" for key in policy):
        raise ValueError(f"model transaction property {where} contains property other than 'decoupled'.")
    written = config.get("model_transaction_policy")
    if written is None:
        config["model_transaction_policy"] = {key: bool(value) for key, value in policy.items()}
    elif "decoupled" not in policy:
        pass
    elif "decoupled" not in written:
        written["decoupled"] = bool(policy["decoupled"])
    elif bool(written.get("decoupled", False)) != bool(policy["decoupled"]):
        raise ValueError(
            f"trying to change decoupled property in auto-complete-config for model '{_name(config)}', which is "
            f"already set to '{bool(written.get('decoupled', False))}'."
        )


def add_input(config: Document, tensor: Document) -> None:
    """Add an input or complete the written one. Keys: name, data_type ("TYPE_FP32"), dims, optional."""
    _add(config, "input", tensor, _INPUT_KEYS)


def add_output(config: Document, tensor: Document) -> None:
    """Add an output or complete the written one. Keys: name, data_type, dims."""
    _add(config, "output", tensor, _OUTPUT_KEYS)


def _add(config: Document, what: str, tensor: Document, allowed: tuple[str, ...]) -> None:
    model = _name(config)
    subject = f"{what} '{tensor['name']}'" if "name" in tensor else what
    if any(key not in allowed for key in tensor):
        listed = ", ".join(f"'{key}'" for key in allowed[:-1]) + f" and '{allowed[-1]}'"
        raise ValueError(
            f"{subject} in auto-complete-config function for model '{model}' contains property other than {listed}."
        )
    if "name" not in tensor:
        raise ValueError(f"{what} in auto-complete-config function for model '{model}' is missing 'name' property.")
    added = _typed(what, tensor)
    tensors = config.setdefault(what, [])
    written = next((item for item in tensors if item.get("name") == tensor["name"]), None)
    if written is None:
        tensors.append(added)
        return
    _complete(model, what, written, added)


def _typed(what: str, tensor: Document) -> Document:
    """Return the tensor with a checked type name, and dims as a list of integers."""
    added = dict(tensor)
    name = added.get("data_type", "TYPE_INVALID")
    if isinstance(name, int) and 0 <= name < len(_DATA_TYPES):
        name = _DATA_TYPES[name]
    if name not in _DATA_TYPES:
        raise ValueError(f"{what} '{added['name']}' has the unknown data type '{name}'")
    added["data_type"] = name
    added["dims"] = [int(dim) for dim in added.get("dims", [])]
    return added


def _complete(model: str, what: str, written: Document, added: Document) -> None:
    """Complete a written tensor. All checks come first, so a rejected tensor changes nothing."""
    name = written["name"]
    written_type = written.get("data_type", "TYPE_INVALID")
    if written_type != "TYPE_INVALID" and added["data_type"] not in ("TYPE_INVALID", written_type):
        raise ValueError(
            f"unable to load model '{model}', configuration expects datatype {written_type} for {what} '{name}', "
            f"model provides {added['data_type']}"
        )
    written_dims = [int(dim) for dim in written.get("dims", [])]
    if written_dims and added["dims"] and added["dims"] != written_dims:
        raise ValueError(
            f"model '{model}', tensor '{name}': the model expects dims {added['dims']} but the model configuration "
            f"specifies dims {written_dims}"
        )
    # the JSON form of a configuration has it in every input
    if "optional" in added and written.get("optional", added["optional"]) != added["optional"]:
        raise ValueError(
            f"model '{model}', tensor '{name}': the model expects optional {added['optional']} but the model "
            f"configuration specifies optional {written['optional']}"
        )
    if written_type == "TYPE_INVALID":
        written["data_type"] = added["data_type"]
    if not written_dims:
        written["dims"] = added["dims"]
    if "optional" in added:
        written["optional"] = bool(added["optional"])


def _name(config: Document) -> str:
    return str(config.get("name", ""))


def merge(written: ModelConfig, completed: Document | ModelConfig) -> ModelConfig:
    """Return a copy of `written` with the fields that `auto_complete_config` may set from `completed` (P2, C72).

    These are max_batch_size, inputs, outputs, dynamic_batching and the transaction policy; other changes are ignored.
    Raises `InstanceError` for a contradiction, and when `completed` is no configuration.
    """
    from charonia.models.config_forms import from_json, to_json
    from protos.model_config_pb2 import ModelConfig

    if not isinstance(completed, (dict, ModelConfig)):
        raise InstanceError(invalid_result(written.name))
    document = to_json(written)
    if isinstance(completed, dict):
        try:
            completed = from_json(completed)
        except Exception as error:
            raise InstanceError(f"{invalid_result(written.name)} {error}") from error
    offered = to_json(completed)
    try:
        if offered["max_batch_size"]:
            set_max_batch_size(document, offered["max_batch_size"])
        for tensor in offered["input"]:
            add_input(document, {key: value for key, value in tensor.items() if key in _INPUT_KEYS and value})
        for tensor in offered["output"]:
            add_output(document, {key: value for key, value in tensor.items() if key in _OUTPUT_KEYS and value})
        if "dynamic_batching" in offered:
            set_dynamic_batching(document)
        if "model_transaction_policy" in offered:
            set_model_transaction_policy(document, offered["model_transaction_policy"])
    except ValueError as error:
        raise InstanceError(str(error)) from error
    return from_json(document)


def invalid_result(model_name: str) -> str:
    """The error text for an `auto_complete_config` that returns no configuration (P2)."""
    return f"auto_complete_config function in model '{model_name}' must return a valid pb.ModelConfig object."
