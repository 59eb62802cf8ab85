"""Any configuration survives its JSON and its text; any version policy serves only what exists, in order."""

from __future__ import annotations

import json
from typing import Any

from example_counts import examples
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.models.config_forms import parse
from executors.configuration.config import InstanceError, from_json, to_json
from executors.repository.model_directory import select, version_of
from protos.model_config_pb2 import ModelConfig, ModelVersionPolicy

_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32, allow_nan=False),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: st.text(max_size=5),
}


def _scalar(draw: st.DrawFn, field: Any) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return draw(st.sampled_from(sorted(field.enum_type.values_by_number)))
    return draw(_SCALARS[field.cpp_type])


def _fill(draw: st.DrawFn, message: Message) -> None:
    """Set some of the fields, at any depth, driven by the descriptor so that no field is forgotten."""
    field: Any
    for field in message.DESCRIPTOR.fields:
        if draw(st.integers(0, 3)):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key_field, value_field = field.message_type.fields
            key = _scalar(draw, key_field)
            if value_field.message_type is None:
                getattr(message, field.name)[key] = _scalar(draw, value_field)
            else:
                _fill(draw, getattr(message, field.name)[key])
        elif field.is_repeated:
            for _ in range(draw(st.integers(1, 2))):
                if field.message_type is None:
                    getattr(message, field.name).append(_scalar(draw, field))
                else:
                    _fill(draw, getattr(message, field.name).add())
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _fill(draw, getattr(message, field.name))
        else:
            setattr(message, field.name, _scalar(draw, field))


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    config = ModelConfig()
    _fill(draw, config)
    return config


@given(configs())
@settings(max_examples=examples(60), deadline=None)
def test_json_round_trip(config: ModelConfig) -> None:
    document = to_json(config)
    assert from_json(document) == config
    assert from_json(json.dumps(document)) == config
    assert to_json(from_json(document)) == document


@given(configs())
@settings(max_examples=examples(30), deadline=None)
def test_text_round_trip(config: ModelConfig) -> None:
    assert parse(MessageToString(config)) == config


_versions = st.lists(st.integers(1, 2**63 - 1) | st.integers(1, 12), max_size=8)


@st.composite
def policies(draw: st.DrawFn) -> ModelVersionPolicy:
    policy = ModelVersionPolicy()
    choice = draw(st.sampled_from(["unset", "latest", "all", "specific"]))
    if choice == "latest":
        policy.latest.num_versions = draw(st.integers(0, 5))
    elif choice == "all":
        policy.all.SetInParent()
    elif choice == "specific":
        policy.specific.versions.extend(draw(_versions))
    return policy


@given(policies(), _versions)
def test_selection(policy: ModelVersionPolicy, available: list[int]) -> None:
    choice = policy.WhichOneof("policy_choice")
    try:
        served = select(policy, available, "m")
    except InstanceError:
        chosen = {"specific": set(policy.specific.versions) & set(available), "latest": policy.latest.num_versions > 0}
        assert not available or not chosen[str(choice)]
        return
    assert served == sorted(set(served))
    left_out = set(available) - set(served)
    assert set(served) <= set(available)
    if choice == "all":
        assert not left_out
    elif choice == "specific":
        assert set(served) == set(available) & set(policy.specific.versions)
    else:
        assert len(served) == min(len(set(available)), 1 if choice is None else policy.latest.num_versions)
        assert all(version < served[0] for version in left_out)


@given(st.integers(1, 2**63 - 1))
def test_every_version_has_one_directory_name(version: int) -> None:
    assert version_of(str(version)) == version
    assert version_of("0" + str(version)) is None
