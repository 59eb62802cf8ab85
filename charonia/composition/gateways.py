"""Checks the option values of gateways, holds the ports that several of one `serve` share (`--gateways`), and makes the
values of each.

Every gateway listens on the same port by SO_REUSEPORT, and the kernel gives each new connection to one of them. The
supervisor holds the port by a socket that is bound and never listens: the kernel gives it no connection, and no other
program gets the port while no gateway listens (before the first is up, between a crash and the restart).
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from charonia.errors import StartupError
from charonia.options.role_settings import restricted_groups, tls_settings
from charonia.options.settings import GatewaySettings
from charonia.options.trace_options import trace_options
from charonia.options.values import Values

_SERVICES = {"http": "HTTP", "grpc": "GRPC", "sagemaker": "SageMaker", "vertex_ai": "Vertex AI", "openai": "OpenAI"}


def check_gateway(values: Values) -> None:
    """Check what a gateway itself checks, once it is connected to the log: restrictions, patterns of headers, networks
    of webhooks, tenants, certificates. Imports what is in use alone. Raises `StartupError`.
    """
    for front, word in (("http", "api"), ("grpc", "protocol")):
        option, pattern = f"{front}-restricted-{word}", f"{front}-header-forward-pattern"
        entries, written = values[option.replace("-", "_")], values[pattern.replace("-", "_")]
        if entries or written:
            from gateway.access.restrictions import HeaderForwarding, Restrictions

            Restrictions(restricted_groups(option, entries), StartupError, word=word)
            HeaderForwarding(written, f"--{pattern}")
    if values["webhook_allow"]:
        from gateway.webhooks.addresses import Allowed

        Allowed.parse(values["webhook_allow"])
    header, keys = values["tenant_header"], unless_pipe(values["api_keys"])
    if header or keys:
        from gateway.access.tenants import Tenants

        Tenants.of(GatewaySettings("check", tenant_header=header, api_keys=keys))
    for front, is_on in (("http", values["allow_http"] or values["allow_openai"]), ("grpc", values["allow_grpc"])):
        if is_on and (tls := tls_settings(front, values)) is not None:
            from gateway.tls import ServerTls, certificates

            if front == "grpc" and values["grpc_front"] == "grpcio":
                certificates(tls)  # grpcio has a library of its own, which may take others than ours
            else:
                ServerTls(tls, [])


def unless_pipe(file: str) -> str:
    """Return the name of a file that a check may read; "" for a pipe or terminal, whose content is gone once read."""
    try:
        kind = os.stat(file).st_mode
    except (OSError, ValueError):
        return file  # the check says why it cannot be read
    return "" if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) else file


def share_ports(values: Values) -> tuple[Values, list[socket.socket]]:
    """The option values for gateways that share ports, and the sockets that hold these ports while they are open.

    A port of 0 becomes a free one. A single gateway binds its ports itself: its values stay as they are. Raises
    `StartupError` when a port cannot be had (V5), also when another `serve` of this user shares it among its gateways.
    """
    if values["gateways"] == 1:
        return values, []
    shared, held = dict(values), []
    try:
        for front, service in _SERVICES.items():
            if values[f"allow_{front}"]:
                address, port = values[f"{front}_address"].strip("[]"), values[f"{front}_port"]
                reuse = "reuse_grpc_port" if front == "grpc" else "reuse_http_port"
                socket_of_front = hold_port(address, port, service=service, with_others=values[reuse])
                held.append(socket_of_front)
                shared[f"{front}_port"] = socket_of_front.getsockname()[1]
                shared[reuse] = True
    except BaseException:
        for taken in held:
            taken.close()
        raise
    return shared, held


def hold_port(address: str, port: int, *, service: str, with_others: bool = False) -> socket.socket:
    """A bound socket that never listens and keeps a port for this user's listeners with SO_REUSEPORT.

    Port 0 picks a free one. No other process may have the port, unless it is shared `with_others`
    (`--reuse-http-port`). Raises `StartupError`.
    """
    from gateway.listening import bound, listen

    held = bound(address, port, service=service, reuse_port=with_others)
    if with_others:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return held
    try:
        # Linux lets several sockets with SO_REUSEADDR bind one port as long as none listens. Only a listener, here for
        # an instant, shows that no other supervisor holds the port
        probe = listen(address, held.getsockname()[1], service=service)
    except BaseException:
        held.close()
        raise
    # Linux reads both flags whenever another socket wants the port: from here on it is shared with SO_REUSEPORT alone
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    probe.close()
    return held


def values_of_each(values: Values) -> list[Values]:
    """The option values of each gateway: the same, but for the trace file, of which each needs its own.

    The first writes the file that was asked for, the second `<name>-2<extension>`, and so on. The first one alone
    listens on Unix sockets.
    """
    each = [values]
    if values["gateways"] > 1:
        file = trace_options(values).file
        for number in range(2, values["gateways"] + 1):
            own = _trace_file(values, file, number) if file else {}
            each.append({**values, **own, "http_socket": "", "grpc_socket": ""})
    return each


def _trace_file(values: Values, file: str, number: int) -> Values:
    path = Path(file)
    own = path.with_stem(f"{path.stem}-{number}")
    return {"trace_file": "", "trace_config": (*values["trace_config"], f"triton,file={own}")}
