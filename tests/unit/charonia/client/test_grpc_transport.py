"""What the transport says where no gRPC service answers."""

from __future__ import annotations

import socket
import threading

import h2.config
import h2.connection
import h2.events
import pytest

from charonia.client import Client, RetryPolicy
from charonia.errors import CharoniaError


def _answer(listening: socket.socket, status: str) -> None:
    """Answer the first request of the first connection with a status and no body, as no gRPC service does."""
    connection, _ = listening.accept()
    with connection:
        state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        state.initiate_connection()
        connection.sendall(state.data_to_send())
        while data := connection.recv(65536):
            for event in state.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    state.send_headers(event.stream_id, [(":status", status)], end_stream=True)
            connection.sendall(state.data_to_send())


@pytest.mark.parametrize(("status", "suspected"), [("404", True), ("502", False), ("503", False)])
def test_a_proxy_without_its_server_is_not_taken_for_the_other_port(status: str, suspected: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=_answer, args=(listening, status))
        answering.start()
        client = Client(f"grpc://127.0.0.1:{listening.getsockname()[1]}", retry=RetryPolicy(attempts=1))
        try:
            with pytest.raises(CharoniaError) as failure:
                client.metadata("model")
        finally:
            client.close()
            answering.join()
    assert status in failure.value.message
    assert ("is this the server's HTTP port?" in failure.value.message) is suspected
