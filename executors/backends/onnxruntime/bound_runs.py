"""Runs a session over memory of its device that stays at its place, as CUDA graphs need it.

The first batch of each form (shapes and types) runs as it comes, and its tensors are kept: later ones of this form are
copied into them. A graph is captured for each form, and replayed from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from charonia.backend import Array

_MAX_FORMS = 32
"""More forms than that run without a graph: each keeps memory of the device."""

GRAPH = "gpu_graph_id"
_NO_GRAPH = "-1"


@dataclass(frozen=True, slots=True)
class _Form:
    """A binding, and the tensors that it is of."""

    binding: Any
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    options: Any
    """Of its runs: they name its graph."""


class BoundRuns:
    """The runs of one instance, made one at a time. `device` is `cuda`; with `cpu` nothing but the graphs is missing.

    `options` is that of the run that was made last, or is being made.
    """

    def __init__(self, ort: Any, session: Any, device: str, device_id: int, run_options: Callable[[str], Any]) -> None:
        """`run_options` makes options with a value for `gpu_graph_id`."""
        self._ort, self._session, self._run_options = ort, session, run_options
        self._free_options = self.options = run_options(_NO_GRAPH)
        self._device = (device, device_id)
        self._names = [output.name for output in session.get_outputs()]
        self._forms: dict[tuple[object, ...], _Form] = {}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Run a batch. The arrays that are returned are copies."""
        key = tuple((name, array.shape, array.dtype.str) for name, array in sorted(inputs.items()))
        form = self._forms.get(key)
        if form is None:
            return self._first(key, inputs, outputs)
        for name, array in inputs.items():
            form.inputs[name].update_inplace(np.ascontiguousarray(array))
        self.options = form.options
        self.options.terminate = False
        self._session.run_with_iobinding(form.binding, self.options)
        return {name: form.outputs[name].numpy().copy() for name in outputs}

    def _first(self, key: tuple[object, ...], inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        # copies: on the CPU the library's tensors would be the caller's memory
        given = {
            name: self._ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C"), *self._device)
            for name, array in inputs.items()
        }
        binding = self._session.io_binding()
        for name, value in given.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._names:
            binding.bind_output(name, *self._device)
        self.options = self._free_options
        self.options.terminate = False
        self._session.run_with_iobinding(binding, self.options)
        made = dict(zip(self._names, binding.get_outputs(), strict=True))
        if len(self._forms) < _MAX_FORMS:
            kept = self._session.io_binding()
            for name, value in given.items():
                kept.bind_ortvalue_input(name, value)
            for name, value in made.items():
                kept.bind_ortvalue_output(name, value)
            self._forms[key] = _Form(kept, given, made, self._run_options(str(len(self._forms))))
        return {name: made[name].numpy().copy() for name in outputs}
