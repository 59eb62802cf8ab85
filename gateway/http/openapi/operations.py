"""One entry for each method of each path of the HTTP interface: what it takes and every status it answers. Pure.

The routes themselves are `gateway.http.routes` and `gateway.http.http_application`; a test compares both with
this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.requests.preferences import MAX_WAIT_S

from . import examples
from .schemas import TEXT, Schema, ref

JSON = "application/json"
BINARY = "application/octet-stream"
EVENTS = "text/event-stream"

ANY = (400, 403, 431, 500, 503)
"""A request that is no HTTP, a restricted API, too many headers, the unforeseen, a gateway that stops."""
JOB = (401, 404, 429)
RESULT = (*JOB, 501, 504)
"""What an inference may end with beside; model code chooses among them."""
GENERATION = (*RESULT, 422)
INFERENCE = (*GENERATION, 413)


@dataclass(frozen=True, slots=True)
class Content:
    """A body of one media type."""

    media_type: str
    schema: Schema
    example: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """A response that is no error. `headers` are names and what they say."""

    about: str
    contents: tuple[Content, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    links: tuple[str, ...] = ()
    """Ids of operations that go on with the job of the response."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    place: str
    about: str
    schema: Schema = field(default_factory=lambda: TEXT)
    example: Any = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path. `errors` are the statuses with an error body."""

    method: str
    path: str
    id: str
    tag: str
    summary: str
    replies: dict[int, Reply]
    errors: tuple[int, ...] = ANY
    about: str = ""
    parameters: tuple[Parameter, ...] = ()
    bodies: tuple[Content, ...] = ()
    body_required: bool = False
    error_schema: str = "Error"


def all_operations() -> Iterator[Operation]:
    """Every operation, those of a model also for one of its versions."""
    for operation in (*_HEALTH, *_METADATA, *_INFERENCE, *_JOBS, *_REPOSITORY, *_SETTINGS, *_SHARED, *_PAGES):
        yield operation
        if operation.path.startswith(_MODEL) and not operation.path.endswith("/setting"):
            path = operation.path.replace(_MODEL, _MODEL + "/versions/{version}")
            summary = f"{operation.summary}, of one version"
            yield replace(operation, path=path, id=operation.id + "OfVersion", summary=summary)


def _json(about: str, name: str, example: Any) -> Reply:
    return Reply(about, (Content(JSON, ref(name), example),))


_MODEL = "/v2/models/{model}"
_DONE = {200: Reply("Done; the body is empty")}

# -- health, metadata, configuration, statistics -----------------------------------------------------------------------

_HEALTH = (
    Operation(
        "get",
        "/v2/health/live",
        "live",
        "health",
        "Whether the server is alive",
        {200: Reply("It is"), 400: Reply("It is not; the body is empty")},
        (403, 431, 500),
    ),
    Operation(
        "get",
        "/v2/health/ready",
        "ready",
        "health",
        "Whether the server is ready for requests",
        {200: Reply("It is"), 400: Reply("It is not; the body is empty")},
        (403, 431, 500),
    ),
    Operation(
        "get",
        _MODEL + "/ready",
        "modelReady",
        "health",
        "Whether a model is ready for requests",
        {200: Reply("It is")},
        (400, 403, 404, 431, 500),
        about="A model that is unknown or not ready is status 400.",
    ),
)

_METADATA = (
    Operation(
        "get",
        "/v2",
        "serverMetadata",
        "metadata",
        "Name, version and extensions of the server",
        {200: _json("The server's metadata", "ServerMetadata", examples.SERVER)},
    ),
    Operation(
        "get",
        _MODEL,
        "modelMetadata",
        "metadata",
        "Inputs, outputs and versions of a model",
        {200: _json("The model's metadata", "ModelMetadata", examples.MODEL)},
        (*ANY, 404),
    ),
    Operation(
        "get",
        _MODEL + "/config",
        "modelConfig",
        "model-config",
        "The normalised configuration of a model",
        {200: _json("The configuration, with the field names of config.pbtxt", "ModelConfig", examples.CONFIG)},
        (*ANY, 404),
    ),
    Operation(
        "get",
        "/v2/models/stats",
        "allStatistics",
        "statistics",
        "Statistics of all loaded versions",
        {200: _json("The same whichever gateway is asked", "ModelStatistics", examples.STATISTICS)},
    ),
    Operation(
        "get",
        _MODEL + "/stats",
        "modelStatistics",
        "statistics",
        "Statistics of a model's loaded versions",
        {200: _json("The same whichever gateway is asked", "ModelStatistics", examples.STATISTICS)},
        (*ANY, 404),
        about="An unknown model is status 400.",
    ),
)

# -- inference ---------------------------------------------------------------------------------------------------------

_PREFER = Parameter(
    "Prefer",
    "header",
    "`respond-async` makes a job of the request; `wait=<seconds>` waits for its end first (RFC 7240)",
)
_PREFER_JOB = Parameter("Prefer", "header", "`respond-async` makes a job of the request (RFC 7240)")
_DELIVERY = (
    Parameter("Idempotency-Key", "header", "a repetition gets the first request's result; at most 255 bytes"),
    Parameter("Charonia-Webhook", "header", "URL that is called when the job has ended"),
    Parameter("Charonia-Webhook-Events", "header", "which ends are posted: succeeded, failed, cancelled, expired"),
    Parameter("Charonia-On-Disconnect", "header", "`cancel` or `keep` the request of a client that leaves"),
    Parameter("Charonia-Durability", "header", "memory, fsync or replicated:<n>"),
    Parameter("Charonia-Retention", "header", "seconds that the result is kept"),
    Parameter("Charonia-Timeout-Ms", "header", "milliseconds within which an answer is of use"),
)
_LENGTH = "Inference-Header-Content-Length"
_ACCEPTED = Reply(
    "A job was made of the request, as `Prefer: respond-async` asks",
    (Content(JSON, ref("AcceptedJob"), examples.ACCEPTED),),
    (("Location", "the job's path"), ("Preference-Applied", "the preferences that count")),
    ("job", "jobResult", "jobEvents", "jobTimeline", "cancelJob"),
)
_BINARY: Schema = {"contentMediaType": BINARY}
_GENERATE = Content(JSON, ref("GenerateRequest"), examples.GENERATE)

_INFERENCE = (
    Operation(
        "post",
        _MODEL + "/infer",
        "infer",
        "inference",
        "One inference",
        {
            200: Reply(
                "The outputs, as JSON or with binary tensors behind it",
                (
                    Content(JSON, ref("InferResponse"), examples.INFERRED),
                    Content(BINARY, _BINARY, examples.INFERRED_BINARY),
                ),
                ((_LENGTH, "bytes of the JSON part, where binary tensors follow it"),),
            ),
            202: _ACCEPTED,
        },
        (*ANY, *INFERENCE),
        about="JSON that does not parse, and a member of the wrong type, are status 500, as in Triton. The body may be "
        "compressed with gzip or deflate.",
        parameters=(
            Parameter(
                _LENGTH, "header", "bytes of the JSON part; 0 for a raw request, whose body is the one input's tensor"
            ),
            _PREFER,
            *_DELIVERY,
        ),
        bodies=(
            Content(JSON, ref("InferRequest"), examples.INFER),
            Content(BINARY, _BINARY, examples.INFER_BINARY),
        ),
        body_required=True,
    ),
    Operation(
        "post",
        _MODEL + "/generate",
        "generate",
        "inference",
        "One inference of plain JSON values with one response",
        {
            200: Reply(
                "The outputs by name",
                (Content(JSON, ref("Generated"), examples.GENERATED),),
            ),
            202: _ACCEPTED,
        },
        (*ANY, *GENERATION),
        about="A model that answers another number of times than once gets an error body, with the status of its first "
        "response.",
        parameters=(_PREFER_JOB, *_DELIVERY),
        bodies=(_GENERATE,),
        body_required=True,
    ),
    Operation(
        "post",
        _MODEL + "/generate_stream",
        "generateStream",
        "inference",
        "One inference with its responses as server-sent events",
        {
            200: Reply(
                "An event for each response; `data` is a GenerateResponse or an Error",
                (Content(EVENTS, ref("GenerateEvent"), examples.GENERATE_EVENT),),
            ),
            202: _ACCEPTED,
        },
        (*ANY, *GENERATION),
        about="The first response decides the status; an error in it is an event as well.",
        parameters=(_PREFER_JOB, *_DELIVERY),
        bodies=(_GENERATE,),
        body_required=True,
    ),
)

# -- jobs --------------------------------------------------------------------------------------------------------------

_JOB = "/v2/jobs/{job_id}"
_FILTERS = (
    Parameter("model", "query", "jobs of this model"),
    Parameter("state", "query", "jobs in this state", ref("Job/properties/state")),
    Parameter("tenant", "query", "jobs of this tenant"),
)

_JOBS = (
    Operation(
        "get",
        "/v2/jobs",
        "listJobs",
        "jobs",
        "List jobs",
        {200: _json("A page; `next` is the cursor of the following one", "JobPage", examples.PAGE)},
        (*ANY, 401, 429),
        parameters=(
            *_FILTERS,
            Parameter(
                "limit", "query", "jobs in a page, 100 without it", {"type": "integer", "minimum": 1, "maximum": 1000}
            ),
            Parameter("cursor", "query", "`next` of the page before"),
        ),
    ),
    Operation(
        "delete",
        "/v2/jobs",
        "cancelJobs",
        "jobs",
        "Cancel all jobs that match",
        {200: _json("How many this call cancelled", "CancelledJobs", {"cancelled": 2})},
        (*ANY, 401, 429),
        about="At least one of the parameters is needed.",
        parameters=_FILTERS,
    ),
    Operation("get", _JOB, "job", "jobs", "State of a job", {200: _json("The job", "Job", examples.JOB)}, (*ANY, *JOB)),
    Operation(
        "delete",
        _JOB,
        "cancelJob",
        "jobs",
        "Cancel a job",
        {200: _json("The job; its state says whether it had ended before", "Job", examples.JOB)},
        (*ANY, *JOB),
    ),
    Operation(
        "get",
        _JOB + "/result",
        "jobResult",
        "jobs",
        "The inference response of a job",
        {
            200: Reply(
                "As `infer` would have answered",
                (
                    Content(JSON, ref("JobResult"), examples.INFERRED),
                    Content(BINARY, _BINARY, examples.INFERRED_BINARY),
                ),
                ((_LENGTH, "bytes of the JSON part, where binary tensors follow it"),),
            ),
            202: Reply(
                "It has not ended: its state",
                (Content(JSON, ref("Job"), examples.WAITING),),
                (("Location", "the job's path"),),
            ),
        },
        (*ANY, *RESULT),
        about="A job that failed, was cancelled or expired answers its error.",
        parameters=(
            Parameter(
                "wait",
                "query",
                f"seconds to wait for the end of the job, at most {MAX_WAIT_S:g}",
                {"type": "number", "minimum": 0, "maximum": 999_999_999},
                5,
            ),
            Parameter(
                "binary",
                "query",
                "outputs as binary tensors or as JSON; without it as the submission asked",
                {"type": "string", "enum": ["true", "false", "1", "0"]},
                "false",
            ),
        ),
    ),
    Operation(
        "get",
        _JOB + "/events",
        "jobEvents",
        "jobs",
        "What happens to a job, as server-sent events",
        {
            200: Reply(
                "An event for each step, to the end of the job", (Content(EVENTS, ref("JobEvent"), examples.JOB_EVENT),)
            ),
            204: Reply("It has ended and all its events were seen"),
        },
        (*ANY, *JOB),
        parameters=(
            Parameter(
                "after",
                "query",
                "id of the last event seen",
                {"type": "string", "pattern": "^[0-9]{1,9}(-[0-9]{1,9})?$"},
                "1",
            ),
            Parameter(
                "Last-Event-ID",
                "header",
                "as `after`, which it overrides",
                {"type": "string", "pattern": "^[0-9]{1,9}(-[0-9]{1,9})?$"},
            ),
        ),
    ),
    Operation(
        "get",
        _JOB + "/timeline",
        "jobTimeline",
        "jobs",
        "What has happened to a job",
        {200: _json("The job and its events", "JobTimeline", examples.TIMELINE)},
        (*ANY, *JOB),
    ),
)

# -- the repository ----------------------------------------------------------------------------------------------------

_STORED = "/v2/repository/models/{model}"
_NAMED = "/v2/repository/{repository}"
_MALFORMED = "JSON that does not parse, and a member of the wrong type, are status 500, as in Triton."


def _body(name: str, example: Any) -> tuple[Content, ...]:
    return (Content(JSON, ref(name), example),)


_REPOSITORY = (
    *(
        Operation(
            "post",
            path,
            name,
            "model-repository",
            summary,
            {200: _json("Every version that was ever loaded", "RepositoryIndex", examples.INDEX)},
            about=_MALFORMED,
            bodies=_body("IndexRequest", {"ready": True}),
        )
        for path, name, summary in (
            ("/v2/repository/index", "repositoryIndex", "Models and their states"),
            (_NAMED + "/index", "namedRepositoryIndex", "The same: the name of a repository is not read"),
        )
    ),
    Operation(
        "post",
        _STORED + "/load",
        "loadModel",
        "model-repository",
        "Load or reload a model",
        {200: Reply("The model is ready; the body is empty")},
        (*ANY, 404, 429, 501),
        about=f"Needs `--model-control-mode=explicit`, otherwise 503. A model that does not load is 500. {_MALFORMED}",
        bodies=_body("LoadRequest", examples.LOAD),
    ),
    Operation(
        "post",
        _STORED + "/unload",
        "unloadModel",
        "model-repository",
        "Unload a model",
        {200: Reply("The model takes no new requests; the body is empty")},
        (*ANY, 404),
        about=f"Needs `--model-control-mode=explicit`, otherwise 503. {_MALFORMED}",
        bodies=_body("UnloadRequest", {"parameters": {"unload_dependents": False}}),
    ),
    Operation(
        "get",
        _STORED + "/route",
        "route",
        "model-repository",
        "The routing rule of a model",
        {200: _json("The rule that holds, null for none", "ModelRoute", examples.ROUTE)},
        about="Without `--model-control-mode=explicit` the values of headers are empty strings.",
    ),
    Operation(
        "post",
        _STORED + "/route",
        "changeRoute",
        "model-repository",
        "Change the routing rule of a model",
        {200: _json("The rule that holds now", "ModelRoute", examples.ROUTE)},
        (*ANY, 404),
        about="Needs `--model-control-mode=explicit`, otherwise 503. What is left out stays as it is. JSON that does "
        "not parse is status 500.",
        bodies=_body("RouteChange", {"candidate": 3, "share": 10.0}),
    ),
    Operation(
        "delete",
        _STORED + "/route",
        "clearRoute",
        "model-repository",
        "Take the routing rule of a model away",
        {200: _json("No rule holds: the highest version gets the requests", "ModelRoute", examples.NO_ROUTE)},
        (*ANY, 404),
        about="Needs `--model-control-mode=explicit`, otherwise 503.",
    ),
    *(
        Operation(
            "post",
            _NAMED + tail,
            id_,
            "model-repository",
            "Not supported: repositories have no names",
            {},
            (*ANY, 404, 501),
        )
        for tail, id_ in (
            ("/models/{model}/load", "namedRepositoryLoad"),
            ("/models/{model}/unload", "namedRepositoryUnload"),
        )
    ),
)

# -- logging and tracing -----------------------------------------------------------------------------------------------


def _trace(path: str, of: str, suffix: str, errors: tuple[int, ...]) -> tuple[Operation, Operation]:
    now = {200: _json("The settings that hold", "TraceSettings", examples.TRACE)}
    return (
        Operation("get", path, "traceSettings" + suffix, "trace", f"Trace settings{of}", now, errors),
        Operation(
            "post",
            path,
            "changeTraceSettings" + suffix,
            "trace",
            f"Change trace settings{of}",
            now,
            (*errors, 501),
            about=_MALFORMED,
            bodies=_body("TraceChange", {"trace_level": ["TIMESTAMPS"], "trace_rate": "100"}),
        ),
    )


_SETTINGS = (
    Operation(
        "get",
        "/v2/logging",
        "logSettings",
        "logging",
        "Log settings",
        {200: _json("The settings that hold", "LogSettings", examples.LOGGING)},
    ),
    Operation(
        "post",
        "/v2/logging",
        "changeLogSettings",
        "logging",
        "Change log settings",
        {200: _json("The settings that hold now", "LogSettings", examples.LOGGING)},
        (*ANY, 501),
        about=f"An unknown format is status 503, a log file 501. {_MALFORMED}",
        bodies=_body("LogChange", {"log_verbose_level": 1, "log_format": "ISO8601"}),
    ),
    *_trace("/v2/trace/setting", "", "", ANY),
    *_trace(_MODEL + "/trace/setting", " of a model", "OfModel", (*ANY, 404)),
)

# -- shared memory -----------------------------------------------------------------------------------------------------


def _regions(kind: str, body: tuple[Content, ...], example: Any) -> tuple[Operation, ...]:
    root, tag, title = f"/v2/{kind}sharedmemory", "shared-memory", kind.capitalize()
    one = root + "/region/{region}"
    listed = {200: _json("The regions", f"{title}Regions", example)}
    every, of_one = (*ANY, 401), (*ANY, 401, 404, 501)
    needs = "Needs `--allow-client-shm=true`, otherwise 501."
    words = f"{kind} shared memory" if kind == "system" else "CUDA shared memory"
    return (
        Operation("get", root + "/status", f"all{title}Regions", tag, f"All regions of {words}", listed, every),
        Operation("get", one + "/status", f"{kind}Region", tag, f"One region of {words}", listed, of_one),
        Operation(
            "post",
            one + "/register",
            f"register{title}Region",
            tag,
            f"Register a region of {words}",
            _DONE,
            of_one,
            about=f"{needs} {_MALFORMED}",
            bodies=body,
        ),
        Operation(
            "post",
            root + "/register",
            f"register{title}RegionWithoutName",
            tag,
            "Refused: the name of the region is missing",
            {},
            of_one,
        ),
        Operation(
            "post",
            one + "/unregister",
            f"unregister{title}Region",
            tag,
            f"Unregister a region of {words}",
            _DONE,
            of_one,
        ),
        Operation(
            "post",
            root + "/unregister",
            f"unregister{title}Regions",
            tag,
            f"Unregister all regions of {words}",
            _DONE,
            every,
        ),
    )


_SHARED = (
    *_regions("system", _body("SystemRegionRequest", examples.SYSTEM_REGION), examples.SYSTEM_REGIONS),
    *_regions("cuda", _body("CudaRegionRequest", examples.CUDA_REGION), examples.CUDA_REGIONS),
)

# -- this document -----------------------------------------------------------------------------------------------------

_PAGES = (
    Operation(
        "get",
        "/openapi.json",
        "openapi",
        "documentation",
        "This document",
        {200: Reply("OpenAPI 3.1", (Content(JSON, {"type": "object"}, {"openapi": "3.1.0"}),))},
        (400, 431, 500, 503),
    ),
    Operation(
        "get",
        "/docs",
        "docs",
        "documentation",
        "This document as a page",
        {200: Reply("HTML without scripts", (Content("text/html; charset=utf-8", TEXT, "<!doctype html>"),))},
        (400, 431, 500, 503),
    ),
)

PATH_PARAMETERS = {
    "model": Parameter("model", "path", "name of a model", {"type": "string", "pattern": "^[^/]+$"}, "identity"),
    "version": Parameter("version", "path", "number of a version", {"type": "string", "pattern": "^[0-9]+$"}, "1"),
    "job_id": Parameter("job_id", "path", "id of a job", {"type": "string", "pattern": "^[^/]+$"}, examples.JOB_ID),
    **{
        name: Parameter(name, "path", f"id of a {name}", {"type": "string", "pattern": "^[^/]+$"}, f"{name}-1")
        for name in ("response", "file", "batch")
    },
    "region": Parameter("region", "path", "name of a region", {"type": "string", "pattern": "^[^/]+$"}, "input"),
    "repository": Parameter(
        "repository", "path", "name of a repository", {"type": "string", "pattern": "^[^/]+$"}, "main"
    ),
}
