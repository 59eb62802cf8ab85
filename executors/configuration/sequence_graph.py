"""Finds the tensors of a model file that belong to the sequence batcher: controls and implicit states (C41, C44, S39).

The server makes and keeps them, so clients do not see them as inputs or outputs, except a state's output that the
configuration lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from charonia.models.config_errors import InstanceError
from charonia.models.sequence_batcher import SequenceBatching
from protos import model_config_pb2 as pb

if TYPE_CHECKING:
    from charonia.backend import TensorSignature


def without_sequence_tensors(
    config: pb.ModelConfig, signatures: Sequence[TensorSignature], what: str
) -> list[TensorSignature]:
    """Return the file's inputs or outputs (`what`) without the sequence batcher's.

    Raises `InstanceError` unless the latter exist with the written type and dims.
    """
    block = SequenceBatching.of(config)
    batch = (-1,) if config.max_batch_size > 0 else ()
    if what == "input":
        made = [("control tensor", c.name, c.datatype.value, (*batch, 1)) for c in block.controls]
        made += [("state input", s.input_name, s.datatype.value, (*batch, *s.dims)) for s in block.states]
        listed: set[str] = set()
    else:
        made = [("state output", s.output_name, s.datatype.value, (*batch, *s.dims)) for s in block.states]
        listed = {item.name for item in config.output}
    known = {signature.name: signature for signature in signatures}
    for role, name, datatype, dims in made:
        found = known.get(name)
        if found is None:
            raise InstanceError(
                f"unable to load model '{config.name}', configuration specified sequence batching {role} '{name}', but "
                "model does not provide that tensor"
            )
        if found.datatype != datatype:
            raise InstanceError(
                f"unable to load model '{config.name}', configuration expects datatype TYPE_{_config(datatype)} for "
                f"{role} '{name}', model provides TYPE_{_config(found.datatype)}"
            )
        if len(found.dims) != len(dims) or any(
            -1 not in (have, want) and have != want for have, want in zip(found.dims, dims, strict=True)
        ):
            raise InstanceError(
                f"unable to load model '{config.name}', configuration expects shape {list(dims)} for {role} '{name}', "
                f"model provides {list(found.dims)}"
            )
    names = {name for _, name, _, _ in made} - listed
    return [signature for signature in signatures if signature.name not in names]


def _config(datatype: str) -> str:
    return "STRING" if datatype == "BYTES" else datatype
