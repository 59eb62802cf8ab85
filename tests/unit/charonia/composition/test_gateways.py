"""What several gateways of one server share, and what each is told on its command line."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port

from charonia.composition.gateways import hold_port, share_ports, values_of_each
from charonia.errors import StartupError
from charonia.options.role_settings import gateway_settings
from charonia.options.trace_options import trace_options
from charonia.options.values import GATEWAY, SERVE, parse, render
from gateway.listening import bound, listen

ADDRESS = "127.0.0.1"
LOOPBACK = (f"--http-address={ADDRESS}", f"--grpc-address={ADDRESS}")


def serve(*flags: str) -> dict[str, Any]:
    return parse(SERVE, (*LOOPBACK, *flags), {}, {})


def test_one_gateway_binds_its_ports_itself() -> None:
    values = serve("--http-port=0", "--grpc-port=0")
    assert share_ports(values) == (values, [])
    assert values_of_each(values) == [values]


def test_free_ports_are_chosen_once_for_all() -> None:
    shared, held = share_ports(serve("--gateways=3", "--http-port=0", "--grpc-port=0"))
    with ExitStack() as stack:
        for each in held:
            stack.enter_context(each)
        ports = [each.getsockname()[1] for each in held]
        command_lines = [render(GATEWAY, each) for each in values_of_each(shared)]
        assert len(command_lines) == 3
        for words in command_lines:
            settings = gateway_settings(parse(GATEWAY, words, {}, {}))
            assert [settings.http_port, settings.grpc_port] == ports
            assert (settings.reuse_http_port, settings.reuse_grpc_port) == (True, True)
            assert not [word for word in words if word.startswith("--gateways")]
            for port in ports:
                stack.enter_context(listen(ADDRESS, port, service="HTTP", reuse_port=True))


@pytest.mark.parametrize(("off", "on"), [("http", "grpc"), ("grpc", "http")])
def test_a_front_that_is_off_has_no_port(off: str, on: str) -> None:
    shared, (held,) = share_ports(serve("--gateways=2", f"--allow-{off}=false", f"--{on}-port=0"))
    with held:
        assert shared[f"{on}_port"] == held.getsockname()[1]
        assert not shared[f"reuse_{off}_port"]


def in_use(port: int, service: str = "HTTP") -> str:
    return f"failed to start {service} service: Unavailable - Socket '{ADDRESS}:{port}' already in use"


def test_a_held_port_is_nobody_elses() -> None:
    """Neither before a gateway listens, nor while one does, nor once it is gone."""
    with hold_port(ADDRESS, 0, service="HTTP") as held:
        port = held.getsockname()[1]

        def is_ours() -> None:
            for take in (listen, hold_port):
                with pytest.raises(StartupError) as caught:
                    take(ADDRESS, port, service="HTTP").close()
                assert str(caught.value) == in_use(port)

        is_ours()
        with listen(ADDRESS, port, service="HTTP", reuse_port=True):
            is_ours()
            with listen(ADDRESS, port, service="HTTP", reuse_port=True):
                is_ours()
        is_ours()
    listen(ADDRESS, port, service="HTTP").close()


def test_two_that_hold_a_port_at_the_same_time_are_told_apart_before_either_listens() -> None:
    port = free_port()
    with bound(ADDRESS, port, service="HTTP"), hold_port(ADDRESS, port, service="HTTP"):
        with pytest.raises(StartupError) as caught:
            hold_port(ADDRESS, port, service="HTTP")
        assert str(caught.value) == in_use(port)


def test_no_connection_goes_to_the_socket_that_holds() -> None:
    with hold_port(ADDRESS, 0, service="HTTP") as held:
        where = held.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where)
        with listen(ADDRESS, where[1], service="HTTP", reuse_port=True) as one, ExitStack() as clients:
            one.setblocking(True)
            for _ in range(32):
                client = clients.enter_context(socket.create_connection(where))
                accepted, address = one.accept()
                accepted.close()
                assert address == client.getsockname()


def test_a_port_is_had_again_though_connections_of_before_linger() -> None:
    """The server closed them first, as a drain does: they stay in TIME_WAIT for a minute."""
    with listen(ADDRESS, 0, service="HTTP") as before:
        before.setblocking(True)
        port = before.getsockname()[1]
        with socket.create_connection((ADDRESS, port)) as client:
            before.accept()[0].close()
            assert client.recv(1) == b""
    with hold_port(ADDRESS, port, service="HTTP"), listen(ADDRESS, port, service="HTTP", reuse_port=True):
        pass


@pytest.mark.parametrize(("front", "service"), [("http", "HTTP"), ("grpc", "GRPC")])
def test_a_taken_port_has_the_usual_text_and_nothing_stays_held(front: str, service: str) -> None:
    with closing(socket.create_server((ADDRESS, 0))) as taken:
        port, other = taken.getsockname()[1], free_port()
        flags = {"http": f"--http-port={other}", "grpc": f"--grpc-port={other}", front: f"--{front}-port={port}"}
        with pytest.raises(StartupError) as caught:
            share_ports(serve("--gateways=2", *flags.values()))
        assert str(caught.value) == in_use(port, service)
    listen(ADDRESS, other, service="HTTP").close()


def test_one_port_for_both_fronts_is_refused() -> None:
    port = free_port()
    with pytest.raises(StartupError) as caught:
        share_ports(serve("--gateways=2", f"--http-port={port}", f"--grpc-port={port}"))
    assert str(caught.value) == in_use(port, "GRPC")


def test_a_port_that_the_user_shares_may_be_in_use() -> None:
    with listen(ADDRESS, 0, service="HTTP", reuse_port=True) as other:
        port = other.getsockname()[1]
        _, (held,) = share_ports(
            serve("--gateways=2", f"--http-port={port}", "--reuse-http-port=true", "--allow-grpc=false")
        )
        held.close()
        with pytest.raises(StartupError, match="already in use"):
            share_ports(serve("--gateways=2", f"--http-port={port}", "--allow-grpc=false"))


@pytest.mark.parametrize(
    "flags", [("--trace-config=triton,file=/traces/of.today.json",), ("--trace-file=/traces/of.today.json",)]
)
def test_each_gateway_has_a_trace_file_of_its_own(flags: tuple[str, ...]) -> None:
    told = [parse(GATEWAY, render(GATEWAY, each), {}, {}) for each in values_of_each(serve("--gateways=3", *flags))]
    names = [Path(trace_options(each).file).name for each in told]
    assert names == ["of.today.json", "of.today-2.json", "of.today-3.json"]


def test_spans_are_sent_by_all_alike() -> None:
    values = serve("--gateways=2", "--trace-config=opentelemetry,url=http://localhost:1/v1/traces")
    assert values_of_each(values) == [values, values]
