"""Clients that ask all the time while a test does something to the server: what they got, and their errors.

`wave_load` has those that send waves, `e2e_asking` has single calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
from e2e_asking import inputs, until
from e2e_models import WIDTH

PATIENCE_S = 60
"""For the last call of a client."""

Asking = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""By the number of a client, what it asks with: a function that asks once, and raises unless the answer is right. It is
called with a number that no other call has.
"""


def ask_scaled(asking: Any, kind: str, model: str, factor: int, number: float) -> None:
    """One call, by a stock client of `kind`, of a model that `e2e_models.scaling` made."""
    value = np.full((1, WIDTH), number, np.float32)
    answer = asking.infer(model, inputs(kind, INPUT0=value)).as_numpy("OUTPUT0")
    assert (answer == factor * value).all()


class Load:
    """`with Load(asking, 16) as load:` has 16 clients, each with a thread of its own, ask during the block.

    `answered` counts right answers by client. Errors of the classes `expected` are kept in `errors` by client, which
    asks on. Any other ends its client, and is raised by `more` and at the end of the block.
    """

    def __init__(self, asking: Asking, clients: int, expected: tuple[type[Exception], ...] = ()) -> None:
        self._asking = asking
        self._expected = expected
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self.answered = [0] * clients
        self.errors: list[list[Any]] = [[] for _ in range(clients)]

    def __enter__(self) -> Self:
        self._tasks = [self._pool.submit(self._ask, number) for number in range(len(self.answered))]
        return self

    def _ask(self, number: int) -> None:
        with self._asking(number) as ask:
            while not self._stop.is_set():
                try:
                    ask(number * 100_003 + self.answered[number])
                except self._expected as error:
                    self.errors[number].append(error)
                else:
                    self.answered[number] += 1

    def more(self, answers: int) -> None:
        """Until each client has so many answers more: with two, the second call began after this one."""
        wanted = [count + answers for count in self.answered]

        def came() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return all(count >= want for count, want in zip(self.answered, wanted, strict=True))

        until(f"{answers} more answers for each client", came)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        try:
            for task in self._tasks:
                task.result(PATIENCE_S)
        finally:
            self._pool.shutdown()
