"""The process of an isolated model: makes one instance with its backend and executes what the executor sends.

Started as `python -m executors.isolation.isolated_process TITLE DESCRIPTOR PARENT`. It ends with its executor.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from multiprocessing.connection import Connection

from charonia.backend import BatchInstance
from charonia.errors import CharoniaError, InternalError, Unsupported
from executors.backends.registry import BackendRegistry
from executors.host.host_policy import restrict_thread
from executors.host.parent_death import die_with

from .isolated_exchange import CLOSE, DONE, EXECUTE, FAILED, LOAD, READY, Message, pack_message, receive, spec_of


def main() -> None:
    _, descriptor, parent = sys.argv[1:]
    die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):
        # signals reach the whole process group; the executor decides when its models end
        signal.signal(number, lambda _number, _frame: None)
    faulthandler.enable()
    os.set_inheritable(int(descriptor), False)
    connection = Connection(int(descriptor))
    instance: BatchInstance | None = None
    while True:
        try:
            message = receive(connection)
        except (EOFError, OSError):
            os._exit(1)
        try:
            answer, instance = _answer(message, instance)
        except CharoniaError as error:
            answer = Message(FAILED, [int(error.code), error.message], {})
        except Exception as error:
            failure = InternalError(f"{type(error).__name__}: {error}")
            answer = Message(FAILED, [int(failure.code), failure.message], {})
        for part in pack_message(answer.kind, answer.detail, answer.arrays):
            connection.send_bytes(part)
        if message.kind == CLOSE:
            return


def _answer(message: Message, instance: BatchInstance | None) -> tuple[Message, BatchInstance | None]:
    if message.kind == LOAD:
        word, spec = spec_of(message)
        restrict_thread(spec.cores)
        made = asyncio.run(BackendRegistry().get(word).create_instance(spec))
        if not isinstance(made, BatchInstance):
            raise Unsupported(f"backend '{word}' runs its models in processes of their own already")
        return Message(READY, bool(getattr(made, "stateless", False)), {}), made
    if message.kind == EXECUTE and instance is not None:
        return Message(DONE, None, dict(instance.execute(message.arrays, message.detail))), instance
    if message.kind == CLOSE:
        if instance is not None:
            instance.close()
        return Message(DONE, None, {}), None
    raise InternalError(f"a message of kind {message.kind} makes no sense here")


if __name__ == "__main__":
    main()
