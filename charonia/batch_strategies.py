"""Custom batching (P22): who may join a batch, beyond what `dynamic_batching` says. The port, and what is shipped.

Pure but for the entry points that it finds. A model names its strategy in its configuration:

    parameters { key: "charonia.batch_strategy" value { string_value: "volume" } }
    parameters { key: "MAX_BATCH_VOLUME_BYTES" value { string_value: "1048576" } }

Others are entry points of the group `charonia.batch_strategies`: callables that take the configuration's parameters
(name to string) and return a `BatchStrategy`, or raise `InvalidArgument` for parameters they do not understand. They
are installed where batchers and executors run: batchers ask them, executors refuse to load a model with one they lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .datatypes import DataType
from .errors import CharoniaError, InvalidArgument

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PARAMETER = "charonia.batch_strategy"
ENTRY_POINT_GROUP = "charonia.batch_strategies"
VOLUME = "volume"
VOLUME_PARAMETER = "MAX_BATCH_VOLUME_BYTES"

_MAX_DIGITS = 20
"""Nothing has as many bytes, and `int` does not read any number of digits."""


class InputOfCandidate(Protocol):
    """One input tensor: its shape as the client sent it, with the batch dimension, and its size."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> DataType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size_bytes(self) -> int: ...


class BatchCandidate(NamedTuple):
    """A request that could join: its rows, the bytes of its input tensors, these, and its own parameters."""

    rows: int
    size_bytes: int
    inputs: Sequence[InputOfCandidate]
    parameters: Mapping[str, object]


Joins = Callable[[BatchCandidate], bool]


class BatchStrategy(Protocol):
    """Asked in the batcher's event loop, so it must be quick, and it must not wait."""

    def begin(self) -> Joins:
        """A batch is formed: what is returned is asked of each request, in order of service, whether it joins.

        The first one is asked as well, so that it is counted, but always joins. One that does not join ends the batch,
        which is sent without waiting for more, and begins the next. The same requests may be asked about several
        times before a batch is sent: what is remembered belongs into what `begin` returns.
        """
        ...


class VolumeStrategy:
    """At most so many bytes of input tensors in one batch; a larger request runs by itself."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    @staticmethod
    def of(parameters: Mapping[str, str]) -> VolumeStrategy:
        """Raises `InvalidArgument` without a positive `MAX_BATCH_VOLUME_BYTES`."""
        text = parameters.get(VOLUME_PARAMETER, "")
        if not (text.isascii() and text.isdecimal() and len(text) < _MAX_DIGITS and int(text) > 0):
            raise InvalidArgument(
                f"the batch strategy '{VOLUME}' needs the parameter '{VOLUME_PARAMETER}', a number of bytes above 0, "
                f"got '{text}'"
            )
        return VolumeStrategy(int(text))

    def begin(self) -> Joins:
        limit_bytes, total_bytes = self.limit_bytes, 0

        def joins(candidate: BatchCandidate) -> bool:
            nonlocal total_bytes
            total_bytes += candidate.size_bytes
            return total_bytes <= limit_bytes

        return joins


def batch_strategy(parameters: Mapping[str, str]) -> BatchStrategy | None:
    """The strategy that a configuration's parameters name, None when they name none.

    Raises `InvalidArgument`, also for whatever the strategy's own code raises.
    """
    name = parameters.get(PARAMETER)
    if name is None:
        return None
    if name == VOLUME:
        return VolumeStrategy.of(parameters)
    for entry in _installed(name):
        try:
            strategy: BatchStrategy = entry.load()(parameters)
        except CharoniaError:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"the batch strategy '{name}' cannot be made: {type(error).__name__}: {error}"
            ) from error
        return strategy
    raise InvalidArgument(
        f"there is no batch strategy '{name}': shipped is '{VOLUME}', others are entry points of the group "
        f"'{ENTRY_POINT_GROUP}'"
    )


def check_batch_strategy(parameters: Mapping[str, str], *, batching: bool) -> None:
    """Raises `InvalidArgument` for a strategy that cannot be had, or where nothing is batched dynamically."""
    if PARAMETER in parameters and not batching:
        raise InvalidArgument(
            f"the parameter '{PARAMETER}' needs 'dynamic_batching' and a 'max_batch_size' of at least 1"
        )
    batch_strategy(parameters)


def _installed(name: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP, name=name)
