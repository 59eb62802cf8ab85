"""Requests over a raw HTTP connection, and their replies."""

from __future__ import annotations

import asyncio
import json

from gateway.http.server import HttpFront


def request(path: str = "/v2/models/identity/infer", size: int = 64, extra: str = "") -> bytes:
    text = json.dumps(
        {
            "inputs": [
                {"name": "INPUT0", "shape": [1, size // 4], "datatype": "FP32",
                 "parameters": {"binary_data_size": size}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()  # fmt: skip
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(text)}\r\n{extra}"
        f"Content-Length: {len(text) + size}\r\n\r\n"
    )
    return head.encode() + text + b"\x01" * size


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def exchange(front: HttpFront, data: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(read_reply(reader), 30)
    finally:
        writer.close()
