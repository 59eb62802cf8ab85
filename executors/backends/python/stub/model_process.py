"""A model process: takes verbs from its executor over a socket, runs them on one model, and ends with the executor.

This module handles the process: the parent's death, signals, and the standard streams; `model_host` runs the model's
code. Started as `python -m executors.backends.python.stub.model_process` with `StartupArguments`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys

from executors.backends.python.api.calls import set_exchange
from executors.backends.python.api.logger import send_lines_to
from executors.backends.python.api.metrics import write_to
from executors.backends.python.protocol.frames import Frame, FrameError, Kind, pack_described
from executors.backends.python.protocol.shared_slots import ModelSlots
from executors.backends.python.protocol.startup_arguments import TRACEBACK_SIGNAL, StartupArguments
from executors.host.parent_death import die_with

from .channel import AbandonedRequests, Broker, Channel, ChannelClosed, Execution
from .model_host import ModelFailure, ModelHost, ModelLocation, described

_EXECUTES = (Kind.EXECUTE, Kind.EXECUTE_COLUMNS)


def main() -> None:
    arguments = StartupArguments.of(sys.argv[1:])
    die_with(arguments.parent)
    _prepare_process()
    connection = socket.socket(fileno=arguments.descriptor)
    os.set_inheritable(arguments.descriptor, False)
    channel = Channel(connection)
    if arguments.board >= 0:
        os.set_inheritable(arguments.board, False)
        write_to(arguments.board)
    slots = _slots(arguments.slots)
    send_lines_to(lambda level, file, line, message: _send_line(channel, level, file, line, message))
    os.register_at_fork(after_in_child=_detach_fork)
    try:
        channel.send(Kind.READY, 0, [os.getpid(), slots is not None])
        _serve(channel, arguments.instance, slots)
    except (ChannelClosed, FrameError) as error:
        sys.stderr.write(f"model process ends: {error}\n")
        sys.stderr.flush()
        # at once, without atexit handlers and joins: without the executor, an orderly end has no use
        os._exit(1)


def _serve(channel: Channel, instance_name: str, slots: ModelSlots | None) -> None:
    host: ModelHost | None = None
    broker = Broker(channel)
    set_exchange(broker)
    abandoned = AbandonedRequests()
    while True:
        frame = channel.receive()
        try:
            if frame.kind in _EXECUTES and host is not None:
                execution = Execution(channel, frame.call, abandoned, described, decoupled=host.decoupled)
                broker.begin(frame.call, execution.has_answered)
                try:
                    if frame.kind is Kind.EXECUTE:
                        reply = host.execute(execution, frame.content(), frame.data)
                    else:
                        reply = host.execute_columns(execution, frame)
                finally:
                    broker.returned()
                    execution.returned()
                kind = Kind.COLUMNS if reply.columns else Kind.DONE
                channel.send_packed(pack_described(kind, frame.call, reply.meta, reply.data))
                del reply  # it may have views of the inputs, whose slot waits to be reused
            elif frame.kind is Kind.HEALTH and host is not None:
                channel.send(Kind.DONE, frame.call, host.is_ready())
            elif frame.kind is Kind.FINALIZE:
                broker.executes = False
                if host is not None:
                    host.finalize()
                channel.send(Kind.DONE, frame.call, None)
                return
            else:
                host = host or _host_of(frame, instance_name, slots)
                broker.model = host.model
                loaded = _load(host, frame)
                broker.executes = frame.kind is Kind.INITIALIZE
                channel.send(Kind.DONE, frame.call, loaded)
        except ModelFailure as failure:
            channel.send(Kind.FAILED, frame.call, [failure.code, failure.message])
            if frame.kind is Kind.FINALIZE:
                return


def _detach_fork() -> None:
    """Disconnect a child that the model forks from the executor."""
    send_lines_to(None)
    set_exchange(None)


def _host_of(frame: Frame, instance_name: str, slots: ModelSlots | None) -> ModelHost:
    location = frame.content()["location"]
    return ModelHost(ModelLocation(*location), instance_name, slots)


def _slots(descriptor: int) -> ModelSlots | None:
    if descriptor < 0:
        return None
    os.set_inheritable(descriptor, False)
    try:
        return ModelSlots(descriptor)
    except (OSError, ValueError):  # not enough address space
        return None
    finally:
        os.close(descriptor)


def _load(host: ModelHost, frame: Frame) -> str | bool | None:
    content = frame.content()
    if frame.kind is Kind.AUTO_COMPLETE:
        return host.auto_complete(content["config"])
    if frame.kind is Kind.INITIALIZE:
        return host.initialize(content["args"], content["outputs"], answers_later=content["answers_later"])
    raise FrameError(f"a model process does not take {frame.kind.name} here")


def _send_line(channel: Channel, level: int, file: str, line: int, message: str) -> None:
    try:
        channel.send(Kind.LOG, 0, [level, file, line, message])
    except ChannelClosed:
        sys.stderr.write(f"{message}\n")


def _prepare_process() -> None:
    # stop signals reach the whole process group; the executor decides when its model processes end (after draining)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _let_executor_decide)
    # not for children that the model forks: multiprocessing stops its workers with SIGTERM
    os.register_at_fork(after_in_child=_restore_signals)
    # after a segmentation fault, a Python traceback is among the last lines, which the executor reports
    faulthandler.enable()
    faulthandler.register(TRACEBACK_SIGNAL)  # and so does a hang
    # a new __pycache__ in a version directory would look like a changed model when the repository is polled
    sys.dont_write_bytecode = True
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def _let_executor_decide(_number: int, _frame: object) -> None:
    """Do nothing. A handler instead of SIG_IGN, which programs that the model starts would inherit."""


def _restore_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    main()
