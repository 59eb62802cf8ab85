"""What a client does step by step: what it asks before what, what it repeats, where it goes on, when it stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from charonia.client import ConnectionLost, JobEvent, JobNotEnded, JobStatus, NotConnected, OnlyCharonia, Result
from charonia.client.backoff import RetryPolicy
from charonia.client.grpc_form import GrpcForm
from charonia.client.http_form import HttpCall, HttpForm
from charonia.client.procedures import Ask, Followed, Give, Next, Open, Pause, Procedures, Step
from charonia.client.results import OVER, Inference
from charonia.errors import (
    CharoniaError,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NotFound,
    StreamInterrupted,
    Unauthenticated,
    Unavailable,
    UnknownError,
    Unsupported,
)

CHARONIA = NotFound("job not found")
OTHER = NotFound("Not Found")
BINARY = {"extensions": ["binary_tensor_data"]}
RESULT = Result("m", "1", "", {})
QUEUED = JobStatus("x.m", "queued", {})
LOST = ConnectionLost("reset")


class Play:
    """Runs a procedure against a server of the test's: `answers` in order, errors raised; pauses pass on the clock.

    `calls` are the paths asked, `given` what the caller got, `took_s` how long it all took.
    """

    def __init__(self, *answers: Any, form: Any = None, attempts: int = 4) -> None:
        self.form = form or HttpForm()
        self.now = 100.0
        self.answers = list(answers)
        self.calls: list[Any] = []
        self.pauses: list[float] = []
        self.given: list[Any] = []
        self.procedures = Procedures(
            self.form, RetryPolicy(attempts, 1.0, 8.0), lambda: self.now, lambda: 0.0, lambda: "new-key"
        )

    def run(self, procedure: Any) -> Any:
        outcome: Any = None
        error: Exception | None = None
        while True:
            try:
                step = procedure.send(outcome) if error is None else procedure.throw(error)
            except StopIteration as end:
                assert not self.answers, "the procedure asked less than was expected"
                return end.value
            outcome, error = None, None
            try:
                outcome = self.perform(step)
            except CharoniaError as raised:
                error = raised

    def perform(self, step: Step) -> Any:
        match step:
            case Pause(seconds):
                self.pauses.append(seconds)
                self.now += seconds
                return None
            case Give(value):
                self.given.append(value)
                return None
            case Ask(exchange, _) | Open(exchange, _):
                call = exchange.call
                self.calls.append(call.path if isinstance(call, HttpCall) else call.method.rpartition("/")[2])
                self.last: Any = step
                if isinstance(step, Open):
                    return None
            case Next():
                pass
        answer = self.answers.pop(0)
        if callable(answer):
            answer = answer(self)
        if isinstance(answer, Exception):
            raise answer
        return answer


def inference(**options: Any) -> Inference:
    return Inference.of("m", {}, options)  # type: ignore[arg-type]


def later(seconds: float, answer: Any) -> Callable[[Play], Any]:
    def pass_time(play: Play) -> Any:
        play.now += seconds
        return answer

    return pass_time


def response(index: int, *, final: bool = False, place: str = "") -> JobEvent:
    return JobEvent(place or f"2-{index + 1}", "response", response=Result("m", "1", str(index), {}), final=final)


def ended(kind: str = "succeeded") -> JobEvent:
    return JobEvent("9", kind)


# -- what is asked first -----------------------------------------------------------------------------------------------


def test_a_plain_call_learns_once_whether_tensors_go_in_binary() -> None:
    play = Play(BINARY, RESULT)
    assert play.run(play.procedures.infer(inference(), None)) is RESULT
    play.answers = [RESULT]
    play.run(play.procedures.infer(inference(), None))
    assert play.calls == ["/v2", "/v2/models/m/infer", "/v2/models/m/infer"]
    assert play.form.binary


@pytest.mark.parametrize(
    ("metadata", "binary"),
    [({"extensions": []}, False), ({}, False), (NotFound("no"), False), (Unauthenticated("who?"), True)],
)
def test_servers_without_the_extension_get_json(metadata: Any, binary: bool) -> None:
    play = Play(metadata, RESULT)
    play.run(play.procedures.infer(inference(), None))
    assert play.form.binary is binary


def test_grpc_needs_no_question() -> None:
    play = Play(RESULT, form=GrpcForm())
    play.run(play.procedures.infer(inference(), None))
    assert play.calls == ["ModelInfer"]


@pytest.mark.parametrize("answer", [OTHER, Unsupported("no"), UnknownError("405"), InternalError("what?"), {"id": "?"}])
def test_only_charonia_has_jobs(answer: Any) -> None:
    play = Play(answer)
    with pytest.raises(OnlyCharonia, match="only Charonia has jobs"):
        play.run(play.procedures.submit(inference(), None))
    for ask in (
        play.procedures.results("x", None),
        play.procedures.cancel("x", None),
        play.procedures.events("x", "", None),
    ):
        with pytest.raises(OnlyCharonia):
            play.run(ask)
    assert len(play.calls) == 1, "what the server is, is asked once"


def test_a_key_is_not_sent_to_a_server_that_would_ignore_it() -> None:
    play = Play(BINARY, OTHER)
    with pytest.raises(OnlyCharonia):
        play.run(play.procedures.infer(inference(idempotency_key="k"), None))
    assert not any(call.endswith("/infer") for call in play.calls)


def test_a_server_that_is_away_is_not_taken_for_another() -> None:
    play = Play(LOST, LOST, LOST, LOST)
    with pytest.raises(Unavailable):
        play.run(play.procedures.submit(inference(), None))
    play.answers = [CHARONIA, QUEUED]
    assert play.run(play.procedures.submit(inference(), None)) is QUEUED


# -- retries -----------------------------------------------------------------------------------------------------------


def test_a_call_that_may_have_been_executed_is_not_repeated() -> None:
    play = Play(LOST, form=GrpcForm())
    with pytest.raises(ConnectionLost):
        play.run(play.procedures.infer(inference(), None))
    assert play.pauses == []


def test_with_a_key_it_is_and_with_the_same_key() -> None:
    play = Play(CHARONIA, LOST, Unavailable("the log is away"), RESULT, form=GrpcForm())
    play.run(play.procedures.infer(inference(idempotency_key="k"), None))
    assert play.pauses == [0.5, 1.0]
    assert play.last.exchange.call.metadata == (("idempotency-key", "k"),)


def test_a_submission_gets_a_key_so_that_it_can_be_repeated() -> None:
    play = Play(CHARONIA, LOST, QUEUED)
    play.run(play.procedures.submit(inference(), None))
    assert play.last.exchange.call.headers["idempotency-key"] == "new-key"
    play.answers = [QUEUED]
    play.run(play.procedures.submit(inference(idempotency_key="mine"), None))
    assert play.last.exchange.call.headers["idempotency-key"] == "mine"


def test_attempts_end() -> None:
    refused = NotConnected("refused")
    play = Play(refused, refused, refused, refused, form=GrpcForm())
    with pytest.raises(NotConnected):
        play.run(play.procedures.infer(inference(), None))
    assert play.pauses == [0.5, 1.0, 2.0]


def test_the_deadline_holds_for_all_attempts_together() -> None:
    refused = NotConnected("refused")
    play = Play(refused, later(0.2, refused), form=GrpcForm())
    with pytest.raises(NotConnected):
        play.run(play.procedures.infer(inference(), 1.5))
    assert play.last.timeout_s == pytest.approx(1.0)
    assert play.now < 101.5, "no pause that the deadline would end"


def test_a_deadline_that_is_over_asks_nothing() -> None:
    play = Play(form=GrpcForm())
    with pytest.raises(DeadlineExceeded):
        play.run(play.procedures.infer(inference(), 0.0))
    assert play.calls == []


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_a_result_is_waited_for_in_portions() -> None:
    play = Play(CHARONIA, later(30, QUEUED), later(30, QUEUED), LOST, [RESULT])
    assert play.run(play.procedures.result("x.m", None)) is RESULT
    assert play.calls[1:] == ["/v2/jobs/x.m/result?wait=30.000&binary=true"] * 4


def test_a_caller_that_stops_waiting_is_shown_where_the_job_is() -> None:
    play = Play(CHARONIA, later(4, QUEUED))
    with pytest.raises(JobNotEnded) as caught:
        play.run(play.procedures.result("x.m", 4))
    assert caught.value.status is QUEUED
    assert play.calls[-1].endswith("wait=4.000&binary=true")
    play = Play(CHARONIA, QUEUED)
    with pytest.raises(JobNotEnded):
        play.run(play.procedures.result("x.m", 0))
    assert play.calls[-1].endswith("wait=0.000&binary=true")


def test_the_error_of_a_job_is_raised() -> None:
    play = Play(CHARONIA, InternalError("words"))
    with pytest.raises(InternalError, match="words"):
        play.run(play.procedures.result("x.m", None))


@pytest.mark.parametrize("results", [[], [RESULT, RESULT]])
def test_a_job_with_several_answers_has_no_one_result(results: list[Result]) -> None:
    play = Play(CHARONIA, results)
    with pytest.raises(Unsupported, match=f"has {len(results)} responses"):
        play.run(play.procedures.result("x.m", None))


def test_events_go_on_behind_the_last_one_that_was_seen() -> None:
    seen = [JobEvent("1", "accepted"), JobEvent("2", "batched"), response(0), ended()]
    play = Play(CHARONIA, seen[0], seen[1], LOST, NotConnected("refused"), seen[2], None, seen[3])
    places: list[str] = []
    play.form.events = lambda job_id, place: places.append(place) or HttpForm().events(job_id, place)
    play.run(play.procedures.events("x.m", "", None))
    assert play.given == seen
    assert places == ["", "2", "2", "2-1"]


def test_events_that_were_all_seen() -> None:
    play = Play(CHARONIA, JobEvent("", OVER))
    play.run(play.procedures.events("x.m", "9", None))
    assert play.given == []


def test_a_reader_gives_up_when_nothing_more_comes() -> None:
    """Failures are counted from the last event on."""
    play = Play(CHARONIA, LOST, LOST, LOST, response(0), LOST, LOST, LOST, LOST)
    with pytest.raises(ConnectionLost):
        play.run(play.procedures.events("x.m", "", None))
    assert len(play.pauses) == 6


def test_a_silent_stream_is_a_lost_connection() -> None:
    play = Play(CHARONIA, later(60, DeadlineExceeded("read")), ended())
    play.run(play.procedures.events("x.m", "", None))
    play = Play(CHARONIA, later(5, DeadlineExceeded("read")))
    with pytest.raises(DeadlineExceeded):
        play.run(play.procedures.events("x.m", "", 5))


def test_a_silent_grpc_stream_is_opened_again_as_long_as_it_takes() -> None:
    """gRPC shows no sign of life of a job that waits in its queue."""
    quiet = [later(60, DeadlineExceeded("call"))] * 20
    play = Play(CHARONIA, QUEUED, *quiet, response(0, place="0", final=True), form=GrpcForm())
    stream(play)
    assert len(play.given) == 1
    assert play.pauses == []


# -- streams -----------------------------------------------------------------------------------------------------------


def stream(play: Play, *, resume: bool | None = None, **options: Any) -> Followed:
    followed = Followed()
    play.run(play.procedures.stream(inference(**options), None, followed, resume))
    return followed


@pytest.mark.parametrize("form", [HttpForm(), GrpcForm()], ids=["http", "grpc"])
def test_a_stream_is_a_job_that_is_followed(form: Any) -> None:
    play = Play(CHARONIA, QUEUED, response(0, place="0"), LOST, response(1, place="1", final=True), form=form)
    followed = stream(play)
    assert [result.id for result in play.given] == ["0", "1"]
    assert (followed.job_id, followed.ended) == ("x.m", True)


def test_a_model_that_answers_once_is_followed_too() -> None:
    play = Play(CHARONIA, QUEUED, JobEvent("1", "accepted"), ended(), [RESULT])
    assert stream(play).ended
    assert play.given == [RESULT]


def test_a_job_without_responses() -> None:
    play = Play(CHARONIA, QUEUED, JobEvent("2-1", "response", final=True))
    stream(play)
    assert play.given == []


@pytest.mark.parametrize("form", [HttpForm(), GrpcForm()], ids=["http", "grpc"])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_flag_alone_is_given_to_those_who_ask_for_it(form: Any, wanted: bool) -> None:
    asked = {"parameters": {"triton_enable_empty_final_response": wanted}, "request_id": "r", "version": 2}
    play = Play(CHARONIA, QUEUED, response(0, place="0"), JobEvent("1", "response", final=True), form=form)
    stream(play, **asked)
    flag = Result("m", "2", "r", {}, {"triton_final_response": True})
    assert play.given[1:] == [flag] * wanted
    play = Play(CHARONIA, QUEUED, response(0, final=True), form=form)
    stream(play, **asked)
    assert len(play.given) == 1, "it came with a response"


def test_that_wish_is_none_of_the_jobs() -> None:
    """Over HTTP a request with it would be refused."""
    submitted: list[bytes] = []

    def accepted(play: Play) -> JobStatus:
        submitted.append(play.last.exchange.call.body)
        return QUEUED

    play = Play(CHARONIA, accepted, JobEvent("2-1", "response", final=True))
    stream(play, parameters={"triton_enable_empty_final_response": True, "mine": 1})
    assert b'"mine":1' in submitted[0]
    assert b"triton_" not in submitted[0]
    with pytest.raises(InvalidArgument, match="boolean"):
        inference(parameters={"triton_enable_empty_final_response": 1})


def test_a_job_that_fails_raises_its_error() -> None:
    play = Play(CHARONIA, QUEUED, response(0), ended("failed"), InternalError("words"))
    with pytest.raises(InternalError):
        stream(play)
    assert len(play.given) == 1
    play = Play(CHARONIA, QUEUED, JobEvent("2-1", "response", error="An Error Occurred"))
    with pytest.raises(UnknownError, match="An Error Occurred"):
        stream(play)


def test_an_interrupted_stream_is_not_resumed() -> None:
    play = Play(CHARONIA, QUEUED, response(0), StreamInterrupted("its executor was lost"))
    with pytest.raises(StreamInterrupted):
        stream(play)
    assert play.pauses == []


def test_with_a_key_of_its_callers_a_stream_that_is_left_goes_on() -> None:
    assert stream(Play(CHARONIA, QUEUED, response(0, final=True)), idempotency_key="k").job_id == ""


def test_another_servers_stream_is_a_plain_one() -> None:
    play = Play(OTHER, RESULT, RESULT, None, form=GrpcForm())
    assert stream(play).job_id == ""
    assert play.given == [RESULT, RESULT]
    assert play.calls == ["ModelInfer", "ModelStreamInfer"]
    play = Play(RESULT, None, form=GrpcForm())
    stream(play, resume=False)
    assert play.calls == ["ModelStreamInfer"]
    with pytest.raises(OnlyCharonia):
        stream(Play(OTHER, form=GrpcForm()), resume=True)


def test_a_plain_stream_is_repeated_only_before_it_began() -> None:
    play = Play(OTHER, NotConnected("refused"), RESULT, None, form=GrpcForm())
    stream(play)
    assert play.given == [RESULT]
    for answers in ([LOST], [RESULT, NotConnected("refused")]):
        play = Play(OTHER, *answers, form=GrpcForm())
        with pytest.raises(Unavailable):
            stream(play)
        assert play.pauses == []


def test_the_job_of_a_stream_that_is_left_is_cancelled_without_a_word() -> None:
    play = Play(LOST)
    play.run(play.procedures.abandon("x.m"))
    assert play.calls == ["/v2/jobs/x.m"]
    assert play.last.exchange.call.method == "DELETE"
