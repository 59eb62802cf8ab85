"""Background tasks are spawned, named, cancelled and reported by `charonia.tasks`.

A function may start a task that it awaits or cancels itself, in a local variable. A task that outlives the function
which starts it is spawned by `Tasks`: so it has a name, an error of it is reported, and the end of its part awaits it.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OWN_TASKS = {
    # tasks of one request or stream, which ends, cancels or awaits them: nothing is added to the path of a request
    "batcher/ensembles/cached_steps.py": 1,
    "charonia/calls/cache/response_cache.py": 1,
    "charonia/inprocess/host.py": 2,
    "executors/backends/python/model_calls.py": 1,
    "executors/backends/python/python_instance.py": 1,
    "executors/generation/generating_instance.py": 1,
    "executors/isolation/child/process_host.py": 1,
    "executors/isolation/child/request_server.py": 1,
    "executors/isolation/strings_apart.py": 1,
    "executors/outgoing_calls.py": 1,
    "gateway/grpc/native/connection_calls.py": 3,
    "gateway/grpc/stream_requests.py": 2,
    "gateway/http/exchanges.py": 1,
    "gateway/http2/request_streams.py": 1,
    "gateway/jobs/job_watches.py": 1,
    "gateway/lane/pending_waves.py": 1,
    "gateway/webhooks/sender.py": 1,
    # gathers deletions at every request
    "batcher/entries/carriers.py": 1,
    # callers that come together await one result
    "gateway/http/http_application.py": 1,
    "gateway/lane/doors.py": 1,
    "gateway/openai/text_models.py": 1,
    "gateway/webhooks/posting.py": 1,
    # the worker of an instance: the end of the instance awaits it, and raises what it raised
    "executors/backends/python/child_process.py": 1,
    "executors/running/stream_workers.py": 1,
    "executors/running/workers.py": 1,
    # whether a task is still the present one matters: a connection that comes back, a watch that is replaced
    "charonia/eventlog/redis/server/hot_connection.py": 1,
    "charonia/eventlog/redis/server/sentinel.py": 1,
    # generates load: what it costs is not the server's
    "charonia/analyzer/http2_lane.py": 1,
    "charonia/analyzer/load_loop.py": 1,
    # `Tasks` itself
    "charonia/tasks.py": 1,
}
"""By module: how many tasks it starts on its own and keeps. New ones are spawned by `Tasks`; a number only shrinks."""


def test_tasks_that_outlive_a_function_are_spawned_in_one_place() -> None:
    found: dict[str, int] = {}
    for package in ("charonia", "gateway", "batcher", "executors"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if "create_task(" in text or "ensure_future(" in text:
                found[path.relative_to(ROOT).as_posix()] = _kept(ast.parse(text))
    assert {name: count for name, count in found.items() if count} == OWN_TASKS


def _kept(tree: ast.Module) -> int:
    """The number of calls that start a task, but for those in expressions, and in assignments to local variables, of
    functions that can await them.
    """
    kept = 0
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        awaits = isinstance(function, ast.AsyncFunctionDef)
        for statement in _statements(function.body):
            starts = sum(_starts_task(node) for node in _expressions(statement))
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            is_kept = any(
                isinstance(part, ast.Attribute | ast.Subscript) for target in targets for part in ast.walk(target)
            )
            if not awaits or is_kept or (isinstance(statement, ast.Expr) and _starts_task(statement.value)):
                kept += starts
    return kept


def _starts_task(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    # a task group awaits its tasks
    return node.func.attr in ("create_task", "ensure_future") and "group" not in ast.unparse(node.func.value)


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """All statements of a function, without those of functions and classes in it."""
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        found.append(statement)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            for part in getattr(statement, name, []):
                found += _statements([part] if isinstance(part, ast.stmt) else part.body)
    return found


def _expressions(statement: ast.stmt) -> list[ast.AST]:
    """The expressions of a statement, without those of the statements in it."""
    found: list[ast.AST] = []
    waiting = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr | ast.withitem)]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += list(ast.iter_child_nodes(node))
    return found
