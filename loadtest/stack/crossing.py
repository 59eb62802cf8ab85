"""What is begun at one gateway is read at another. A program for inside the stack, where gateways have addresses.

It uses the standard library alone: the stack test hands its text to the interpreter of a gateway's container. It prints
one JSON document: what was tried, and what was wrong with it.
"""

import http.client
import json
import socket
import time
import uuid
from typing import Any

PATIENCE_S = 60


def ask(gateway: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON body; names of headers have _ for -."""
    connection = http.client.HTTPConnection(gateway, 8000, timeout=PATIENCE_S)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data else None
    finally:
        connection.close()


def events(
    gateway: str, method: str, path: str, most: int, body: Any = None, **headers: str
) -> list[tuple[str, str, Any]]:
    """Id, kind and data of the first `most` server-sent events; then the reader goes away."""
    connection = http.client.HTTPConnection(gateway, 8000, timeout=PATIENCE_S)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        found: list[tuple[str, str, Any]] = []
        fields: dict[str, str] = {}
        while len(found) < most and (line := answer.readline()):
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            elif "data" in fields:
                found.append((fields.get("id", ""), fields.get("event", ""), json.loads(fields["data"])))
                fields = {}
            else:
                fields = {}
        return found
    finally:
        connection.close()


def tensor(name: str, shape: list[int], values: list[float], datatype: str = "FP32", **parameters: Any) -> Any:
    one = {"name": name, "shape": shape, "datatype": datatype, "data": values}
    return {"inputs": [one], "parameters": parameters} if parameters else {"inputs": [one]}


def sequence(gateways: list[str]) -> None:
    """Six steps, each at the other gateway than the one before."""
    name, found = uuid.uuid4().hex, []
    for step in range(1, 7):
        body = tensor("X", [1, 1], [step], sequence_id=name, sequence_start=step == 1, sequence_end=step == 6)
        status, answer = ask(gateways[step % len(gateways)], "POST", "/v2/models/sums/infer", body)
        assert status == 200, (status, answer)
        found += answer["outputs"][0]["data"]
    assert found == [1, 3, 6, 10, 15, 21], found


def job(gateways: list[str]) -> None:
    """Submitted at one, asked for, followed, listed and fetched at the other; its key is known there."""
    first, second = gateways[:2]
    body, key = tensor("X", [2], [1, 2]), uuid.uuid4().hex
    path = "/v2/models/pipeline/infer"
    status, receipt = ask(first, "POST", path, body, Prefer="respond-async", Idempotency_Key=key)
    assert status == 202, (status, receipt)
    status, answer = ask(second, "GET", f"/v2/jobs/{receipt['id']}/result?wait=30")
    assert (status, answer["outputs"][0]["data"]) == (200, [8, 16]), (status, answer)
    assert ask(first, "GET", f"/v2/jobs/{receipt['id']}/result") == (200, answer)
    status, again = ask(second, "POST", path, body, Prefer="respond-async", Idempotency_Key=key)
    assert (status, again["id"]) == (202, receipt["id"]), again
    listed = [ask(gateway, "GET", "/v2/jobs?model=pipeline") for gateway in (first, second)]
    assert listed[0] == listed[1], listed
    assert receipt["id"] in [one["id"] for one in listed[0][1]["jobs"]], listed
    assert ask(second, "GET", f"/v2/jobs/{receipt['id']}")[1]["attempts"] == 1


def stream(gateways: list[str]) -> None:
    """Left after two responses, taken up at the other: by its key from the beginning, as a job's events behind them."""
    first, second = gateways[:2]
    key, path = uuid.uuid4().hex, "/v2/models/counts/generate_stream"
    begun = [data["OUT"] for _, _, data in events(first, "POST", path, 2, {"N": 30}, Idempotency_Key=key)]
    assert begun == [0, 1], begun
    again = [data["OUT"] for _, _, data in events(second, "POST", path, 99, {"N": 30}, Idempotency_Key=key)]
    assert again == list(range(30)), again

    body = tensor("N", [1], [30], "INT32")
    status, receipt = ask(first, "POST", "/v2/models/counts/infer", body, Prefer="respond-async")
    assert status == 202, receipt
    path = f"/v2/jobs/{receipt['id']}/events"
    seen = events(first, "GET", path, 5)
    seen += events(second, "GET", path, 99, Last_Event_ID=seen[-1][0])
    numbers = [data["response"]["outputs"][0]["data"][0] for _, kind, data in seen if "response" in data]
    assert numbers == list(range(30)), numbers
    assert seen[-1][1] == "succeeded", seen[-1]


def cancel(gateways: list[str]) -> None:
    """A job of one gateway is cancelled at the other."""
    first, second = gateways[:2]
    body = tensor("N", [1], [3000], "INT32")
    status, receipt = ask(first, "POST", "/v2/models/counts/infer", body, Prefer="respond-async")
    assert status == 202, receipt
    events(first, "GET", f"/v2/jobs/{receipt['id']}/events", 3)
    status, view = ask(second, "DELETE", f"/v2/jobs/{receipt['id']}")
    assert (status, view["state"]) == (200, "cancelled"), view
    assert ask(first, "GET", f"/v2/jobs/{receipt['id']}")[1]["state"] == "cancelled"


def same_words(gateways: list[str]) -> None:
    """Readiness, index, configuration and statistics do not depend on who is asked."""
    asked = [("GET", "/v2/health/ready"), ("POST", "/v2/repository/index"), ("GET", "/v2/models/sums/config")]
    asked += [("GET", f"/v2/models/{model}") for model in ("sums", "counts", "pipeline")]
    asked.append(("GET", "/v2/models/stats"))
    give_up_s = time.monotonic() + PATIENCE_S
    while True:  # statistics of what has just ended may be on their way
        said = [[ask(gateway, method, path) for method, path in asked] for gateway in gateways]
        if all(one == said[0] for one in said):
            break
        assert time.monotonic() < give_up_s, [pair for pair in zip(*said, strict=True) if pair[0] != pair[1]]
        time.sleep(0.1)
    statistics = {one["name"]: one for one in said[0][-1][1]["model_stats"]}
    assert statistics["sums"]["inference_stats"]["success"]["count"] >= 6, statistics["sums"]


def main() -> None:
    found = socket.getaddrinfo("gateway", 8000, socket.AF_INET, socket.SOCK_STREAM)
    gateways = sorted({str(address[4][0]) for address in found})
    problems = [] if len(gateways) > 1 else [f"there is one gateway only: {gateways}"]
    tried = []
    for act in (sequence, job, stream, cancel, same_words) if not problems else ():
        tried.append(act.__name__)
        try:
            act(gateways)
        except Exception as error:
            problems.append(f"{act.__name__}: {type(error).__name__}: {error}"[:600])
    print(json.dumps({"gateways": len(gateways), "tried": tried, "problems": problems}))


if __name__ == "__main__":
    main()
