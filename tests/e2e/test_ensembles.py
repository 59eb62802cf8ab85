"""Ensembles, by the public clients: graphs, failures, statistics, life and death."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_asking import client, index, infer, inputs, pending, post, settle, statistics, until
from e2e_models import WIDTH
from e2e_server import Server, serving
from ensemble_models import BIG, ask, build, counted, rows, succeeded
from gated_ensemble import Gate, files_of, job_in
from tritonclient.utils import InferenceServerException


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    build(models)
    wanted = [
        f"--load-model={name}"
        for name in (
            *("chain", "nested", "conditional", "waiting", "spread", "repeated", "running", "remembered", "recalling"),
            *("mixed", "mixed_batching", "rerouting", "rushed", "reshaped"),
        )
    ]
    state = tmp_path_factory.mktemp("state")
    flags = (
        "--cache-config=local,size=1048576",
        "--batcher=separate",
        "--model-control-mode=explicit",
        f"--shm-dir={state / 'shm'}",
        "--metrics-config=histogram_latencies=true",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,0.99:0.001",
    )
    with serving(models, state, *flags, *wanted) as running:
        yield running


def counted_all(server: Server, *models: str) -> dict[str, dict[str, int]]:
    """`counted` of each, once none has anything under way."""
    settle(server, *models)
    return {model: counted(server, model) for model in models}


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_chain_and_its_composing_models_which_it_loaded(server: Server, kind: str) -> None:
    before = counted_all(server, "chain", "double", "batched")
    answer = infer(server, "chain", kind, INPUT0=rows(2), options={"request_id": "mine"})
    np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), rows(2) * 42)
    said = answer.get_response()
    assert (said["id"] if kind == "http" else said.id) == "mine"
    afterwards = counted_all(server, *before)
    for model, counts in before.items():
        after = afterwards[model]
        assert after["executions"] == counts["executions"] + 1, model
        assert after["rows"] == counts["rows"] + 2, model
        assert after["success"] == counts["success"] + 1, model
    # M1: steps count like anybody's requests
    until("counted", lambda: succeeded(server, "triple") == counted(server, "triple")["success"])


def test_what_it_looks_like(server: Server) -> None:
    with client("grpc", server) as asking:
        assert asking.is_model_ready("chain")
        assert asking.get_model_metadata("chain").platform == "ensemble"
        config = asking.get_model_config("chain").config
    assert [step.model_name for step in config.ensemble_scheduling.step] == ["double", "triple", "batched"]
    assert not config.HasField("optimization")
    assert not config.instance_group


def test_its_compute_times_are_the_sums_of_its_steps(server: Server) -> None:
    ask(server, "nested")
    settle(server, "nested", "branches", "triple")
    whole = statistics(server, "nested")["inference_stats"]
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert whole[part]["count"] == whole["success"]["count"]
    parts = [statistics(server, model)["inference_stats"]["compute_infer"] for model in ("branches", "triple")]
    means = sum(int(part["ns"]) / int(part["count"]) for part in parts)
    assert 0 < int(whole["compute_infer"]["ns"]) / int(whole["success"]["count"]) < 20 * means
    executed = f'nv_inference_exec_count{{model="nested",version="1"}} {whole["success"]["count"]}'
    until("they are counted", lambda: executed in server.scrape().replace(".0\n", "\n"))
    until("none is pending", lambda: pending(server, "nested") == 0)


def test_branches_meet_again_and_an_optional_input_may_be_left_out(server: Server) -> None:
    answer = ask(server, "branches")
    np.testing.assert_array_equal(answer.as_numpy("SUM"), rows() * 5)
    np.testing.assert_array_equal(answer.as_numpy("a"), rows() * 2)
    answer = ask(server, "branches", INPUT0=rows(), EXTRA=rows() * 100)
    np.testing.assert_array_equal(answer.as_numpy("SUM"), rows() * 105)


def test_a_nested_ensemble(server: Server) -> None:
    np.testing.assert_array_equal(ask(server, "nested", "http").as_numpy("OUTPUT0"), rows() * 15)


def test_batching_models_and_others_in_one_ensemble(server: Server) -> None:
    """S50: a batch dimension of 1 is added for a model that batches, and taken off for one that does not."""
    row = rows()[0]
    answer = ask(server, "mixed", INPUT0=row)
    np.testing.assert_array_equal(answer.as_numpy("a"), row * 2)
    np.testing.assert_array_equal(answer.as_numpy("SUM"), row * 3)
    answer = ask(server, "mixed_batching", INPUT0=rows())
    np.testing.assert_array_equal(answer.as_numpy("a"), rows() * 2)
    np.testing.assert_array_equal(answer.as_numpy("SUM"), rows() * 3)
    with pytest.raises(InferenceServerException) as failure:
        ask(server, "mixed_batching", INPUT0=rows(2))
    assert failure.value.message() == (
        "in ensemble 'mixed_batching', [request id: <id_unknown>] unexpected shape for input 'B' for model "
        f"'flat_adder'. Expected [{WIDTH}], got [2,{WIDTH}]. "
    )


def test_clients_see_dims_and_steps_the_reshape_of_an_ensembles_tensors(server: Server) -> None:
    """I7; a step that has a `reshape` of its own is called and answers as its other callers see it."""
    for kind in ("http", "grpc"):
        answer = ask(server, "reshaped", kind, INPUT0=rows(3).reshape(3, 2, WIDTH // 2))
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), 2 * rows(3).reshape(3, 1, WIDTH))
        np.testing.assert_array_equal(answer.as_numpy("a"), rows(3))
    with pytest.raises(InferenceServerException, match=r"Expected \[-1,2,2\], got \[1,4\]"):
        ask(server, "reshaped", INPUT0=rows())


def test_only_what_is_asked_for_is_made(server: Server) -> None:
    import tritonclient.grpc as grpcclient

    before = counted_all(server, "adder")
    with client("grpc", server) as asking:
        answer = asking.infer("branches", inputs("grpc", INPUT0=rows()), outputs=[grpcclient.InferRequestedOutput("a")])
    np.testing.assert_array_equal(answer.as_numpy("a"), rows() * 2)
    assert answer.as_numpy("SUM") is None
    assert counted_all(server, "adder") == before


def test_a_condition_decides_whether_a_step_runs(server: Server) -> None:
    before = counted_all(server, "double")
    answer = ask(server, "conditional", INPUT0=rows(), RUN=np.array([[False]]))
    np.testing.assert_array_equal(answer.as_numpy("SUM"), rows())
    assert answer.as_numpy("doubled") is None
    assert counted_all(server, "double") == before
    answer = ask(server, "conditional", INPUT0=rows(), RUN=np.array([[True]]))
    np.testing.assert_array_equal(answer.as_numpy("SUM"), rows() * 3)
    np.testing.assert_array_equal(answer.as_numpy("doubled"), rows() * 2)


def test_steps_of_many_requests_share_batches(server: Server) -> None:
    before = counted_all(server, "batched")["batched"]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: ask(server, "chain", INPUT0=rows() * n), range(32)))
    for number, answer in enumerate(answers):
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), rows() * number * 42)
    after = counted_all(server, "batched")["batched"]
    assert after["success"] - before["success"] == 32
    assert after["executions"] - before["executions"] < 32


def test_large_tensors_pass_through_and_leave_nothing_behind(server: Server) -> None:
    value = np.arange(20_000, dtype=np.int32).reshape(1, -1)
    answer = ask(server, "waiting", INPUT0=rows(), VALUE=value, BIG=BIG)
    np.testing.assert_array_equal(answer.as_numpy("echo"), value)
    np.testing.assert_array_equal(answer.as_numpy("second"), BIG)
    until("its files are gone", lambda: not files_of(server, "waiting"))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_response_of_a_decoupled_step_runs_the_rest(server: Server, count: int) -> None:
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    before = counted(server, "spread")
    with client("grpc", server) as asking:
        assert asking.get_model_config("spread").config.model_transaction_policy.decoupled
        asking.start_stream(callback=lambda result, error: seen.put((result, error)))
        tensors = inputs("grpc", INPUT0=rows(), COUNT=np.array([[count]], np.int32))
        asking.async_stream_infer("spread", tensors, enable_empty_final_response=True)
        answers = []
        while True:
            result, error = seen.get(timeout=60)
            assert error is None, error
            if result.as_numpy("OUTPUT0") is not None:  # an end that comes after the last response has none
                answers.append(result.as_numpy("OUTPUT0"))
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        asking.stop_stream()
    assert len(answers) == count
    for number, answer in enumerate(answers):
        np.testing.assert_array_equal(answer, (rows() + number) * 3)
    until("it is counted once", lambda: counted(server, "spread")["success"] == before["success"] + 1)


def test_the_last_response_of_a_stream_says_that_it_is(server: Server) -> None:
    """S54: a client that did not ask for an empty final response would wait for it for ever."""
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with client("grpc", server) as asking:
        asking.start_stream(callback=lambda result, error: seen.put((result, error)))
        tensors = inputs("grpc", INPUT0=rows(), COUNT=np.array([[3]], np.int32))
        asking.async_stream_infer("spread", tensors, parameters={"flag the last": "yes"})
        answers = [seen.get(timeout=60) for _ in range(3)]
        asking.stop_stream()
    assert [error for _, error in answers] == [None] * 3
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result, _ in answers]
    assert finals == [False, False, True]


def test_a_last_response_without_outputs_runs_the_rest(server: Server) -> None:
    """S54: it is a response; a flag alone would only end the stream."""
    seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with client("grpc", server) as asking:
        asking.start_stream(callback=lambda result, error: seen.put((result, error)))
        for name, count in (("repeated", 0), ("repeated", 1), ("spread", 0)):
            tensors = inputs("grpc", INPUT0=rows(), COUNT=np.array([[count]], np.int32))
            asking.async_stream_infer(name, tensors, parameters={"end bare": "yes"})
            answers = [seen.get(timeout=60) for _ in range(count + 1)]
            if name == "spread":  # its second step needs the output
                assert "expected 1 inputs but got 0 inputs" in answers[-1][1].message()
                continue
            assert [error for _, error in answers] == [None] * (count + 1)
            found = [result.get_response() for result, _ in answers]
            assert [len(response.outputs) for response in found] == [1] * count + [0]
            assert [r.parameters["triton_final_response"].bool_param for r in found] == [False] * count + [True]
        asking.stop_stream()


def test_a_job_keeps_the_last_response_of_a_stream_once(server: Server) -> None:
    tensors = [
        {"name": "INPUT0", "shape": [1, WIDTH], "datatype": "FP32", "data": rows().ravel().tolist()},
        {"name": "COUNT", "shape": [1, 1], "datatype": "INT32", "data": [2]},
    ]
    body = json.dumps({"inputs": tensors, "parameters": {"flag the last": "yes"}})
    status, answer = server.request("POST", "/v2/models/spread/infer", body.encode(), {"Prefer": "respond-async"})
    assert status == 202, answer
    location = f"/v2/jobs/{json.loads(answer)['id']}"
    until("the job is done", lambda: job_in(server, location, "succeeded"))
    status, result = server.get(location + "/result")
    assert status == 200, result
    kept = [one["outputs"][0]["data"] for one in json.loads(result)]
    assert kept == [((rows() + number) * 3).ravel().tolist() for number in range(2)]


def test_latencies_are_measured_where_that_was_asked_for(server: Server) -> None:
    """M4, M5: by the gateway, the owner of ensembles and the executor, on one page."""
    ask(server, "chain")

    def value(page: str, name: str, model: str, more: str = "") -> float | None:
        series = f'{name}{{model="{model}",version="1"{more}}} '
        found = [line for line in page.splitlines() if line.startswith(series)]
        return float(found[0].removeprefix(series)) if found else None

    # answers come before they are measured, and quantiles forget what was long ago
    settle(server, "chain", "double")
    summaries = [
        f"nv_inference_{what}_summary_us"
        for what in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    ]
    first = "nv_inference_first_response_histogram_ms"

    def whole() -> str:
        """A page of all parts on which everything is measured."""
        page = server.scrape()
        for model in ("chain", "double"):
            counts = {value(page, f"{name}_count", model) for name in (*summaries, first)}
            counts |= {value(page, "nv_inference_request_success", model), counted(server, model)["success"]}
            if len(counts) > 1:
                return ""
        return page

    page = until("everything is measured", whole)
    for model in ("chain", "double"):
        assert (value(page, "nv_inference_request_success", model) or 0) > 0
        for name in summaries:
            total = value(page, name.replace("_summary_us", "_duration_us"), model)
            assert value(page, f"{name}_sum", model) == pytest.approx(total, abs=value(page, f"{name}_count", model))
            median, high = (value(page, name, model, f',quantile="{one}"') for one in ("0.5", "0.99"))
            assert median is not None
            assert high is not None
            assert median <= high
    for model in ("spread", "repeater", "chain", "double", "waiting"):
        assert value(page, f"{first}_count", model) == value(page, f"{first}_bucket", model, ',le="+Inf"')
    assert 'request_summary_us_count{model="remembered"' not in page  # M5: it is cached
    assert 'nv_cache_hit_summary_per_model_count{model="remembered",version="1"}' in page
    assert "_within{" not in page
    assert "nv_cpu_memory_total_bytes" in page


def test_a_remembered_answer_skips_all_steps(server: Server) -> None:
    for _ in range(2):
        np.testing.assert_array_equal(ask(server, "remembered", INPUT0=rows() / 2).as_numpy("OUTPUT0"), rows() * 3)
        before = counted_all(server, "double", "triple")
    np.testing.assert_array_equal(ask(server, "remembered", INPUT0=rows() / 2).as_numpy("OUTPUT0"), rows() * 3)
    settle(server, "remembered")
    assert counted_all(server, *before) == before
    stats = statistics(server, "remembered")
    assert stats["execution_count"] == 1
    assert stats["inference_stats"]["cache_hit"]["count"] == 2


def test_steps_are_answered_from_the_cache(server: Server) -> None:
    """K4: a step is looked up before it is asked for, and equal ones under way share an execution."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(server, "recalling", INPUT0=rows() / 8), range(8)))
    for answer in answers:
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), rows() * 25 / 8)
    until("all are counted", lambda: counted(server, "kept")["success"] == 16)
    assert counted(server, "kept")["executions"] == 2
    stats = statistics(server, "kept")["inference_stats"]
    assert (int(stats["cache_hit"]["count"]), int(stats["cache_miss"]["count"])) == (14, 2)
    np.testing.assert_array_equal(ask(server, "kept", INPUT0=rows() / 8).as_numpy("OUTPUT0"), rows() * 5 / 8)
    assert counted(server, "kept")["executions"] == 2, "clients get what steps were answered"
    for count in ("nv_cache_num_hits_per_model{} 15", "nv_inference_request_success{} 17"):
        line = count.replace("{}", '{model="kept",version="1"}')
        until(line, lambda line=line: line in server.scrape())


def test_a_sequence_passes_through(server: Server) -> None:
    """S52: the correlation id and its flags reach the step that has a sequence batcher."""

    def ask_of(sequence: int, number: int) -> np.ndarray:
        options = {"sequence_id": sequence, "sequence_start": number == 1, "sequence_end": number == 3}
        return infer(server, "running", "grpc", options=options, INPUT0=rows() * sequence).as_numpy("OUTPUT0")

    for number in (1, 2, 3):
        for sequence in (7, 8):
            np.testing.assert_array_equal(ask_of(sequence, number), rows() * sequence * 2 * number)
    with pytest.raises(InferenceServerException) as failure:
        ask(server, "running")
    assert failure.value.message() == (
        "in ensemble 'running', inference request to model 'total' must specify a non-zero or non-empty correlation ID"
    )


def test_answers_say_of_which_sequence_they_are(server: Server) -> None:
    """S52: in the response's parameters; what a step says in its own wins, for the steps after it as well."""

    def told(model: str, kind: str, **options: Any) -> dict[str, Any]:
        said = infer(server, model, kind, options=options, INPUT0=rows()).get_response()
        if kind == "http":
            return dict(said["parameters"])
        return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in said.parameters.items()}

    for kind in ("http", "grpc"):
        whole = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
        assert told("chain", kind) == whole
        assert told("nested", kind) == whole
        found = told("chain", kind, sequence_id="mine", sequence_start=True, sequence_end=True)
        assert found == {"sequence_id": "mine", "sequence_start": True, "sequence_end": True}
        # without it the step would have been refused, which needs a sequence
        assert told("rerouting", kind, parameters={"sequence": 77}) == whole | {
            "sequence_id": 77,
            "sequence_start": True,
        }


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failing_step_fails_its_request_alone(server: Server) -> None:
    before = counted_all(server, "branches", "nested", "adder")
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(ask, server, "nested") for _ in range(7)]
        with pytest.raises(InferenceServerException) as failure:
            infer(server, "nested", "grpc", options={"parameters": {"fail": "it broke"}}, INPUT0=rows())
    assert failure.value.message() == "in ensemble 'nested', in ensemble 'branches', it broke"
    assert failure.value.status() == "StatusCode.INTERNAL"
    for task in good:
        np.testing.assert_array_equal(task.result().as_numpy("OUTPUT0"), rows() * 15)
    for model, after in counted_all(server, *before).items():
        times = 1 if model == "adder" else 2  # M11: in an ensemble a failure counts as answered and as ended
        assert after["fail"] == before[model]["fail"] + times, model
        assert after["success"] == before[model]["success"] + 7, model
    for model in ("nested", "branches"):
        until("its failure is counted", lambda model=model: failures(server, model, "OTHER") == 2)


def failures(server: Server, model: str, reason: str) -> float:
    """`nv_inference_request_failure` of version 1."""
    found = re.search(
        rf'^nv_inference_request_failure{{model="{model}",reason="{reason}",version="1"}} (\S+)$', server.scrape(), re.M
    )
    return float(found[1]) if found is not None else 0.0


def test_a_step_that_waits_too_long_is_counted_where_it_waited(server: Server) -> None:
    with pytest.raises(InferenceServerException) as failure:
        ask(server, "rushed")
    assert failure.value.message() == "in ensemble 'rushed', Request timeout expired"
    assert failure.value.status() == "StatusCode.UNAVAILABLE"
    until("the step is counted", lambda: failures(server, "impatient", "REJECTED") == 1)
    until("the ensemble is counted", lambda: failures(server, "rushed", "OTHER") == 2)
    assert counted_all(server, "impatient")["impatient"]["fail"] == 1


def test_an_output_that_no_step_makes_is_left_out(server: Server) -> None:
    """S50: of the answer, and of what its consumers are asked with."""
    silent = {"parameters": {"silent": "yes"}}
    answer = infer(server, "branches", "grpc", options=silent, INPUT0=rows())
    assert [output.name for output in answer.get_response().outputs] == ["a"]
    np.testing.assert_array_equal(answer.as_numpy("a"), rows() * 2)
    with pytest.raises(InferenceServerException) as failure:
        infer(server, "nested", "grpc", options=silent, INPUT0=rows())
    assert failure.value.message() == (
        "in ensemble 'nested', [request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'triple'. Got "
        "input(s) [], but missing required input(s) ['INPUT0']. Please provide all required input(s)."
    )
    assert failure.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_what_cannot_be_loaded_says_why(server: Server) -> None:
    def refused(model: str) -> str:
        status, answer = post(server, f"/v2/repository/models/{model}/load")
        assert status == 400, answer
        return str(answer["error"])

    head = "load failed for model '{0}': {1}\n"
    assert refused("lacking") == head.format(
        "lacking", "ensemble lacking contains models that are not available or ambiguous: nobody"
    )
    circle = "circular dependency between ensembles: round -> ... -> about -> round"
    assert refused("round") == head.format("round", circle)
    assert refused("unfit") == head.format(
        "unfit",
        "in ensemble unfit, ensemble tensor INPUT0: inconsistent shape: [-1,5] is inferred from model unfit while "
        "[-1,4] is inferred from model double",
    )


# -- life and death ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["batcher", "executor"])
@pytest.mark.long
def test_a_crash_in_the_middle_repeats_nothing_that_was_done(server: Server, tmp_path: Path, role: str) -> None:
    before, copied = counted(server, "triple"), counted(server, "copying")["success"]
    with ThreadPoolExecutor(1) as pool:
        gate = Gate(server, tmp_path, pool)
        gate.until_entered()
        until("the first step is done", lambda: counted(server, "triple")["success"] == before["success"] + 1)
        # an executor that is killed as it writes an answer leaves its file, which is kept for an hour
        until("the copies are done", lambda: counted(server, "copying")["success"] == copied + 2)
        (pid,) = server.pids(role)
        assert files_of(server, "waiting")  # what a successor reads on from
        if role == "executor":
            gate.forget_entered()
        os.kill(pid, signal.SIGKILL)
        until("it is started again", lambda: server.pids(role) not in ([], [pid]))
        if role == "executor":
            gate.until_entered()
        gate.open()
        answer = gate.task.result(90)
    np.testing.assert_array_equal(answer.as_numpy("SUM"), rows() * 3)
    np.testing.assert_array_equal(answer.as_numpy("echo"), [[7]])
    np.testing.assert_array_equal(answer.as_numpy("second"), BIG)
    assert counted(server, "triple")["executions"] == before["executions"] + 1
    until("its files are gone", lambda: not files_of(server, "waiting"))


def test_a_job_survives_its_owner(server: Server, tmp_path: Path) -> None:
    entered, opened = tmp_path / "entered", tmp_path / "gate"
    shapes = {"INPUT0": [1, WIDTH], "BIG": [1, 30_000], "VALUE": [1, 1]}
    data = {"INPUT0": rows().ravel().tolist(), "BIG": BIG.ravel().tolist(), "VALUE": [7]}
    types = {"INPUT0": "FP32", "BIG": "FP32", "VALUE": "INT32"}
    tensors = [{"name": n, "shape": shapes[n], "datatype": types[n], "data": data[n]} for n in shapes]
    parameters = {"entered": str(entered), "gate": str(opened)}
    body = json.dumps({"inputs": tensors, "parameters": parameters, "outputs": [{"name": "SUM"}, {"name": "second"}]})
    status, answer = server.request("POST", "/v2/models/waiting/infer", body.encode(), {"Prefer": "respond-async"})
    assert status == 202, answer
    location = f"/v2/jobs/{json.loads(answer)['id']}"
    # what is not wanted is not run: the gated step of this job
    done = until("the job is done", lambda: job_in(server, location, "succeeded"))
    assert not entered.exists()
    assert done["attempts"] == 1
    body = json.dumps({"inputs": tensors, "parameters": parameters})
    status, answer = server.request("POST", "/v2/models/waiting/infer", body.encode(), {"Prefer": "respond-async"})
    assert status == 202, answer
    location = f"/v2/jobs/{json.loads(answer)['id']}"
    until("the gated step has begun", entered.exists)
    (pid,) = server.pids("batcher")
    os.kill(pid, signal.SIGKILL)
    until("it is started again", lambda: server.pids("batcher") not in ([], [pid]))
    opened.touch()
    until("the job is done", lambda: job_in(server, location, "succeeded"))
    status, result = server.get(location + "/result")
    assert status == 200, result
    outputs = {output["name"]: output["data"] for output in json.loads(result)["outputs"]}
    assert outputs["SUM"] == (rows() * 3).ravel().tolist()
    assert outputs["second"] == BIG.ravel().tolist()


def test_who_gives_up_stops_the_steps(server: Server, tmp_path: Path) -> None:
    entered = tmp_path / "second"

    def ask_for(timeout_s: float) -> Any:
        options = {"parameters": {"entered": str(entered)}, "client_timeout": timeout_s}
        return infer(
            server, "waiting", "grpc", options=options, INPUT0=rows(), VALUE=np.array([[8]], np.int32), BIG=BIG
        )

    with ThreadPoolExecutor(2) as pool:
        held = Gate(server, tmp_path, pool)
        held.until_entered()
        for timeout_s in (1.0, 3.0, 10.0, 50.0):  # more where its step does not begin to wait by then
            before = counted(server, "gated")
            asked = pool.submit(ask_for, timeout_s)
            waited = until("its step waits", lambda asked=asked: pending(server, "gated") or (asked.done() and -1))
            with pytest.raises(InferenceServerException, match=r"[Dd]eadline"):
                asked.result()
            if waited == 1:
                break
        until("its step is given up", lambda: counted(server, "gated")["fail"] > before["fail"])
        held.open()
        held.task.result(60)
    assert not entered.exists()


def test_unloading_goes_up_and_down_the_graph(server: Server) -> None:
    def unload(model: str, **parameters: object) -> None:
        status, answer = post(server, f"/v2/repository/models/{model}/unload", {"parameters": parameters})
        assert status == 200, answer

    def ready() -> set[str]:
        return {name for (name, _), row in index(server).items() if row.get("state") == "READY"}

    wanted = {"chain", "nested", "branches", "double", "triple", "batched", "adder"}
    until("all are loaded, perhaps again", lambda: wanted <= ready())  # a test before may have killed the executor
    unload("branches")  # takes along what is composed of it
    until("nested is unloaded", lambda: not ready() & {"branches", "nested"})
    assert {"chain", "double", "triple", "adder"} <= ready()
    unload("chain", unload_dependents=True)  # takes along what nobody else is composed of
    until("chain and batched are unloaded", lambda: not ready() & {"chain", "batched"})
    assert {"double", "triple"} <= ready()
    status, _ = post(server, "/v2/repository/models/chain/load")
    assert status == 200
    assert {"chain", "batched"} <= ready()
    np.testing.assert_array_equal(ask(server, "chain").as_numpy("OUTPUT0"), rows() * 42)
    unload("batched")
    until("chain is unloaded", lambda: not ready() & {"chain", "batched"})
    status, _ = post(server, "/v2/repository/models/batched/load")  # its ensemble comes with it
    assert status == 200
    until("chain is back", lambda: {"chain", "batched"} <= ready())
    unload("chain", unload_dependents=True)
    until("chain is unloaded again", lambda: "chain" not in ready())
    assert "batched" in ready(), "it was asked for by its name"
    status, _ = post(server, "/v2/repository/models/chain/load")
    assert status == 200
