"""The `Decoder` over OpenVINO: one pass of a flat graph, with keys and values in blocks of this module's memory.

Exact steps (ADR 0042): the library's attention has other kernels for one token, for several of a sequence, and for
fewer sequences than threads, which round differently. Each token is therefore passed as a sequence of its own, whose
past are the tokens before it, and there are never fewer than threads. Then the keys, values and logits of a token
depend on the tokens before it alone, bit by bit: not on its neighbours in the step, nor on how a prompt was cut.
Products in float32 (asked for, or of a processor that cannot multiply bytes) have other kernels for one row and for
more than 80, so they have two at least and `_MOST_FLOAT_ROWS` at most: longer steps take several passes (ADR 0080).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from charonia.errors import InternalError, InvalidArgument
from executors.backends.openvino.model_reading import reason
from executors.generation.engine import StepInput

from .adapter_sites import Place
from .adapters import read_adapter
from .graph import KEY_CACHE, MASK, SAMPLED, VALUE_CACHE, read_flat

BLOCK_TOKENS = 32
"""What the library's kernels have."""
_FEWEST_BLOCKS = 2
_WARM_TOKENS = 16
_MOST_FLOAT_ROWS = 64
"""Below the 80 rows up to which one kernel was measured. A prompt of 512 tokens takes 1.04 times as long as at once."""
_ELEMENTS = {"f32": "float32", "f16": "float16", "u8": "uint8"}


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """How a decoder runs. `blocks` of keys and values, else as many as `memory_bytes` hold.

    `precision` is theirs: f32, f16 or u8. Adapters have `adapter_slots` slots of `adapter_rank` columns.
    """

    threads: int
    context: int
    blocks: int | None = None
    memory_bytes: int = 1 << 30
    precision: str = "f32"
    activations: str = "i8"
    """Of the products with weights: i8, with a scale for each 32 values, or f32."""
    adapter_slots: int = 0
    adapter_rank: int = 16
    adapter_places: Collection[Place] | None = None
    """The products that adapters may change, None for all: each costs every step, used or not."""
    exact: bool = True
    """Whether a token's logits depend on the tokens before it alone; else long prompts are read faster."""


class OpenVinoDecoder:
    """An `executors.generation.engine.Decoder`. The logits of a step may change with the next step."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, path: str, settings: DecoderSettings) -> None:
        """Read and compile the IR at `path`. Raises `CharoniaError` with the reason."""
        import openvino

        self._openvino = openvino
        self.adapter_slots = settings.adapter_slots
        self._rank = settings.adapter_rank
        self._exact = settings.exact
        self._fewest = settings.threads if settings.exact else 0
        self._fewest_sampled, self._most = 1, 0
        if settings.exact and (settings.activations == "f32" or not multiplies_bytes(_processor())):
            self._fewest, self._fewest_sampled, self._most = max(2, settings.threads), 2, _MOST_FLOAT_ROWS
        columns = settings.adapter_slots * settings.adapter_rank
        core = openvino.Core()
        graph = read_flat(core, path, adapter_columns=columns, adapter_places=settings.adapter_places)
        self.vocabulary = graph.vocabulary
        self._sites = graph.sites
        properties = {
            "INFERENCE_NUM_THREADS": str(settings.threads),
            "ENABLE_CPU_PINNING": "NO",
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": settings.precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if settings.activations == "f32":
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
        try:
            self._compiled: Any = core.compile_model(graph.model, "CPU", properties)
            self._request: Any = self._compiled.create_infer_request()
        except RuntimeError as error:
            raise InternalError(f"openvino error: {reason(error)}") from None
        names = {name for node in self._compiled.inputs for name in node.names}
        self._has_positions = "position_ids" in names
        self._caches = [node for node in self._compiled.inputs if node.any_name.startswith((KEY_CACHE, VALUE_CACHE))]
        self.block_bytes = sum(_block_bytes(node) for node in self._caches)
        self.blocks = settings.blocks or settings.memory_bytes // self.block_bytes
        if self.blocks < _FEWEST_BLOCKS:
            raise InvalidArgument(
                f"keys and values have room for {self.blocks} blocks of {BLOCK_TOKENS} tokens "
                f"({self.block_bytes >> 10} KiB each), at least {_FEWEST_BLOCKS} are needed"
            )
        self.context = min(settings.context, self.blocks * BLOCK_TOKENS)
        self._inputs: dict[str, npt.NDArray[Any]] = {}
        """What a step sets, in the library's memory."""
        # the last block is that of tokens that only fill a step
        self._memory = [self._bound(node.any_name, _cache_shape(node, self.blocks + 1), node) for node in self._caches]
        self._mask_of: npt.NDArray[np.float32] | None = None
        self._columns: dict[str, npt.NDArray[np.float32]] = {}
        if self._sites:
            self._bind_adapters(columns)

    @property
    def memory_bytes(self) -> int:
        """What keys and values take when all blocks were used."""
        return self.block_bytes * self.blocks

    def step(self, step: StepInput) -> npt.NDArray[np.float32]:
        """See `Decoder.step`. The array may be the library's own: it changes with the next step."""
        if self._request is None:
            raise InternalError("the decoder was closed")
        if not self._most or len(step.tokens) <= self._most >= len(step.sampled):
            return self._pass(step)
        logits = np.empty((len(step.sampled), self.vocabulary), np.float32)
        for one, places in in_passes(one_by_one(step, 0, self.blocks), self._most):
            logits[places] = self._pass(one)
        return logits

    def _pass(self, step: StepInput) -> npt.NDArray[np.float32]:
        """The logits of one call of the library, in its own memory."""
        request = self._request
        if self._exact:
            step = one_by_one(step, self._fewest, self.blocks)
        lengths = step.past_lengths + np.diff(step.begins)
        self._set("input_ids", step.tokens.astype(np.int64))
        if self._has_positions:
            self._set("position_ids", step.positions.astype(np.int64))
        self._set("past_lens", step.past_lengths)
        self._set("subsequence_begins", step.begins)
        self._set("block_indices", step.blocks)
        self._set("block_indices_begins", step.block_begins)
        self._set("max_context_len", np.array(lengths.max(), np.int32))
        missing = max(0, self._fewest_sampled - len(step.sampled))
        self._set(SAMPLED, np.concatenate([step.sampled, np.zeros(missing, np.int32)]) if missing else step.sampled)
        if self._mask_of is not None:
            self._set(MASK, self._mask_of[step.adapters][:, None, :])
        try:
            request.infer()
        except RuntimeError as error:
            raise InternalError(f"openvino error: {reason(error)}") from None
        logits: npt.NDArray[np.float32] = request.get_output_tensor(0).data
        return logits.reshape(-1, self.vocabulary)[: len(step.sampled)]

    def warm_up(self) -> None:
        """Run steps that only write to the block of tokens that fill steps. The first pass over several tokens packs
        weights and compiles kernels: a quarter of a second of processor time that no request should wait for.
        """
        for count in (_WARM_TOKENS, 1):
            zeros = np.zeros(count, np.int32)
            begins = np.arange(count + 1, dtype=np.int32)
            scratch = np.full(count, self.blocks, np.int32)
            self.step(StepInput(zeros, zeros, zeros, begins, scratch, begins, zeros[:1], zeros - np.int32(1)))

    def load_adapter(self, slot: int, directory: str) -> None:
        """Write an adapter's weights into the columns of a slot. Raises `InvalidArgument` for one that does not fit."""
        if not 0 <= slot < self.adapter_slots:
            raise InvalidArgument(f"there is no adapter slot {slot}, but {self.adapter_slots}")
        weights = read_adapter(directory, self._sites, self._rank)
        at = slice(slot * self._rank, (slot + 1) * self._rank)
        for site in self._sites:
            a, b = self._columns[site.a], self._columns[site.b]
            a[:, at] = 0
            b[at] = 0
            found = weights.get(site)
            if found is not None:
                rank = len(found.a)
                a[:, at.start : at.start + rank] = found.a.T
                b[at.start : at.start + rank] = found.b.T

    def check_adapter(self, directory: str) -> None:
        """Raises `InvalidArgument` for an adapter that `load_adapter` would refuse, and where there are no slots."""
        if not self.adapter_slots:
            raise InvalidArgument("the model has no slots for adapters (parameter 'charonia.adapter_slots')")
        read_adapter(directory, self._sites, self._rank)

    def close(self) -> None:
        """Release the model; the memory of blocks is freed with it."""
        self._request = self._compiled = None
        self._inputs.clear()
        self._memory.clear()
        self._columns.clear()

    def _set(self, name: str, array: npt.NDArray[Any]) -> None:
        """Set an input of the next step. An array of the shape of the one before is copied into that one's memory,
        which takes a tenth of the time of a new tensor.
        """
        kept = self._inputs.get(name)
        if kept is not None and kept.shape == array.shape:
            kept[...] = array
            return
        tensor = self._openvino.Tensor(array)
        self._request.set_tensor(name, tensor)
        self._inputs[name] = tensor.data

    def _bound(self, name: str, shape: tuple[int, ...], node: Any) -> npt.NDArray[Any]:
        """Zeroed memory that is an input of every step; its pages are taken when they are first written."""
        word = node.element_type.get_type_name()
        dtype = np.dtype(_ELEMENTS[word])
        pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        array = np.frombuffer(pages, dtype).reshape(shape)
        self._request.set_tensor(name, self._openvino.Tensor(array, shared_memory=True))
        return array

    def _bind_adapters(self, columns: int) -> None:
        for node in self._compiled.inputs:
            name = node.any_name
            if name.startswith(("adapter_a.", "adapter_b.")):
                shape = tuple(dim.get_length() for dim in node.partial_shape)
                self._columns[name] = self._bound(name, shape, node)
        # the last row is of tokens without an adapter: index -1
        self._mask_of = np.zeros((self.adapter_slots + 1, columns), np.float32)
        for slot in range(self.adapter_slots):
            self._mask_of[slot, slot * self._rank : (slot + 1) * self._rank] = 1


def one_by_one(step: StepInput, fewest: int, scratch: int) -> StepInput:
    """The same step with a sequence for each token, and at least `fewest` of them: the last ones write to `scratch`."""
    counts, missing = np.diff(step.begins), max(0, fewest - len(step.tokens))
    if not missing and len(step.past_lengths) == len(step.tokens):
        return step
    sequences = np.repeat(np.arange(len(counts)), counts)
    needed = step.positions // BLOCK_TOKENS + 1
    ends = np.cumsum(needed)
    places = np.arange(ends[-1]) + np.repeat(step.block_begins[sequences] - (ends - needed), needed)
    total, none = len(step.tokens) + missing, np.zeros(missing, np.int32)
    return StepInput(
        tokens=np.concatenate([step.tokens, none]),
        positions=np.concatenate([step.positions, none]),
        past_lengths=np.concatenate([step.positions, none]),
        begins=np.arange(total + 1, dtype=np.int32),
        blocks=np.concatenate([step.blocks[places], none + np.int32(scratch)]),
        block_begins=np.concatenate([[0], ends, ends[-1] + 1 + np.arange(missing)]).astype(np.int32),
        sampled=step.sampled,
        adapters=np.concatenate([step.adapters, none - np.int32(1)]),
    )


def in_passes(step: StepInput, most: int) -> Iterator[tuple[StepInput, npt.NDArray[np.intp]]]:
    """A step whose tokens are sequences, cut into steps of at most `most` tokens and as many sampled ones; and the
    rows of each in the logits of the whole.
    """
    for begin in range(0, len(step.tokens), most):
        tokens = slice(begin, begin + most)
        block_begins = step.block_begins[begin : begin + most + 1]
        rows = np.flatnonzero((begin <= step.sampled) & (step.sampled < begin + most))
        part = StepInput(
            tokens=step.tokens[tokens],
            positions=step.positions[tokens],
            past_lengths=step.past_lengths[tokens],
            begins=np.arange(len(block_begins), dtype=np.int32),
            blocks=step.blocks[block_begins[0] : block_begins[-1]],
            block_begins=block_begins - block_begins[0],
            sampled=step.sampled[rows[:most]] - np.int32(begin),
            adapters=step.adapters[tokens],
        )
        yield part, rows[:most]
        for at in range(most, len(rows), most):  # places that are sampled twice; their tokens are computed again
            yield replace(part, sampled=step.sampled[rows[at : at + most]] - np.int32(begin)), rows[at : at + most]


def multiplies_bytes(processor: str) -> bool:
    """Whether the library computes eight-bit activations in eight bits on a processor, by `/proc/cpuinfo`."""
    return "vnni" in processor or "amx_int8" in processor


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _cache_shape(node: Any, blocks: int) -> tuple[int, ...]:
    return (blocks, *(dim.get_length() for dim in list(node.partial_shape)[1:]))


def _block_bytes(node: Any) -> int:
    word = node.element_type.get_type_name()
    if word not in _ELEMENTS:
        raise InternalError(f"keys and values of type {word} are not known here")
    return math.prod(_cache_shape(node, 1)) * np.dtype(_ELEMENTS[word]).itemsize
