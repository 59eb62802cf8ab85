"""Tests mirror the product: a unit test has the name and place of its module, and each module has a test of its name.

A test of a module may be in any folder of tests: what needs a server is not in `unit`. The lists in `mirror` name what
departs from the rule for now. They only shrink: delete a line when it is no longer true, add none.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("charonia", "gateway", "batcher", "executors", "protos")
UNIT = ROOT / "tests" / "unit"


def _list(name: str) -> set[str]:
    lines = (Path(__file__).parent / "mirror" / name).read_text().splitlines()
    assert lines == sorted(set(lines)), f"{name} is in order, without doubles"
    return set(lines)


def _modules() -> dict[str, Path]:
    """The modules that are written by hand, by their paths."""
    found = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {
        path.as_posix(): path
        for path in found
        if path.name != "__init__.py" and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    }


def test_unit_tests_lie_beside_their_modules() -> None:
    missing = [path for path in UNIT.rglob("test_*.py") if not (ROOT / path.parent.relative_to(UNIT)).is_dir()]
    assert not missing


def test_a_unit_test_has_the_name_of_a_module() -> None:
    """Or of a folder of modules that it tests together."""
    strangers = set()
    for path in UNIT.rglob("test_*.py"):
        name, folder = path.stem.removeprefix("test_"), path.parent.relative_to(UNIT)
        is_known = (ROOT / folder / f"{name}.py").exists() or (ROOT / folder / name).is_dir() or name == folder.name
        if not is_known:
            strangers.add(path.relative_to(UNIT).as_posix())
    allowed = _list("unit_tests_of_no_module.txt")
    assert not strangers - allowed, "name it after the module that it tests, and put it in that folder"
    assert not allowed - strangers, "delete these lines"


def test_a_module_has_a_test_of_its_name() -> None:
    names = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    untested = {name for name, path in _modules().items() if path.stem not in names}
    allowed = _list("modules_without_a_test.txt")
    assert not untested - allowed, "write tests/.../test_<module>.py"
    assert not allowed - untested, "delete these lines"
