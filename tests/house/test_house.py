"""The house rules that no linter knows: where tests lie, what folders hold, what no module may do."""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import every_topology
import pytest

ROOT = Path(__file__).resolve().parents[2]
_TEST = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)
PACKAGES = ("charonia", "gateway", "batcher", "executors", "protos")

MOST_MODULES = 14
MOST_METHODS = 14
SHARED_NAMES = {
    "app": "each service is composed in its own",
    "service": "each service has one",
    "metrics": "each service has its own; in the API of python models Triton's word",
    "waves": "what the Redis adapter does with waves, and their bytes",
    "jobs": "a fact of the log, what an adapter does with it, and the gateway's use case",
    "errors": "the kernel's, and those of the API of python models, which imports no kernel",
    "inference": "the kernel's, and that of the API of python models, which imports no kernel",
}
"""Names that several modules have, and why. Twelve at most."""


def _modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def test_no_module_can_unpickle() -> None:
    names = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    pattern = re.compile(rf"\b(?:{'|'.join(names)})\b")
    suspects = [path for path in _modules() if pattern.search(path.read_text())]
    assert not [str(path.relative_to(ROOT)) for path in suspects if _imports(path) & names]


def _docstring(path: Path) -> str:
    """What a module says of itself. Only its first tokens are read: to parse all modules takes seconds."""
    aside = (tokenize.COMMENT, tokenize.NL)
    with tokenize.open(path) as file:
        tokens = (token for token in tokenize.generate_tokens(file.readline) if token.type not in aside)
        first, second = next(tokens), next(tokens, None)
        if first.type != tokenize.STRING or second is None or second.type != tokenize.NEWLINE:
            return ""
    said = ast.literal_eval(first.string)
    return said.strip() if isinstance(said, str) else ""


def test_every_module_says_its_job() -> None:
    written = [path for path in _modules() if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]
    assert len(written) > 500
    assert not [str(path.relative_to(ROOT)) for path in written if path.read_text().strip() and not _docstring(path)]


_SAYS_PURE = re.compile(r"(?:\A|[.:)`]\s+)Pure\b(?!,? but\b|, with\b)")
"""`Pure but for the clock` and the like say what a module does that the import contract cannot allow."""


def test_a_module_says_that_it_is_pure_if_the_import_contract_has_it() -> None:
    """A folder in the contract says it for its modules."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    pure = next(each for each in contracts if each["name"].startswith("pure "))["source_modules"]
    said = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): _docstring(path)
        for path in _modules()
    }
    assert not [name for name in pure if not re.search(r"\bpure\b", said[name], re.IGNORECASE)]
    held = tuple(f"{name}." for name in pure)
    assert not [name for name, text in said.items() if _SAYS_PURE.search(text) and not f"{name}.".startswith(held)]


def _folders() -> dict[Path, list[Path]]:
    """The folders of product code, and the modules in each."""
    found: dict[Path, list[Path]] = {}
    for path in _modules():
        if path.relative_to(ROOT).parts[0] != "protos":
            found.setdefault(path.parent, []).append(path)
    return found


def test_no_folder_has_more_than_fourteen_modules() -> None:
    counts = {folder: sum(path.name != "__init__.py" for path in paths) for folder, paths in _folders().items()}
    assert len(counts) > 50
    assert not {str(folder.relative_to(ROOT)): count for folder, count in counts.items() if count > MOST_MODULES}


def test_every_folder_says_what_lives_there() -> None:
    """What it holds, what it may import, where to begin reading (docs/adr/0019)."""
    missing = []
    for folder in _folders():
        text = " ".join((ast.get_docstring(_parsed(folder / "__init__.py")) or "").split())
        if not re.search(r"\bimport", text) or "Begin reading at" not in text:
            missing.append(str(folder.relative_to(ROOT)))
    assert not missing


def test_a_module_name_occurs_twice_only_for_a_reason() -> None:
    names: dict[str, int] = {}
    for paths in _folders().values():
        for path in paths:
            names[path.stem] = names.get(path.stem, 0) + 1
    assert {name for name, count in names.items() if count > 1} - {"__init__"} == set(SHARED_NAMES)


def test_each_role_of_the_log_has_few_methods() -> None:
    """Who needs two takes a log of those two; only who opens the log, or passes it on, needs all of `EventLog`."""
    tree = ast.parse((ROOT / "charonia/eventlog/port.py").read_text())
    counts = {
        node.name: sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
    }
    assert len(counts) > 10
    assert not {name: count for name, count in counts.items() if count > MOST_METHODS}
    assert counts["EventLog"] == 2, "a method belongs to a role"


def test_no_room_is_called_utils() -> None:
    forbidden = {"utils", "util", "common", "helpers", "helper", "base", "manager"}
    # the name of the module that Triton's python models import is part of the interface (P1)
    assert not [path for path in _modules() if path.stem in forbidden]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "charonia" / "eventlog" / "scripts").glob("*.lua")), ids=lambda p: p.name
)
def test_every_script_names_its_keys(path: Path) -> None:
    text = path.read_text()
    header = "\n".join(line for line in text.splitlines() if line.startswith("--"))
    for used in set(re.findall(r"KEYS\[\d+\]", text)):
        assert used in header, f"{path.name} does not explain {used}"


def test_the_readme_begins_with_the_two_commands() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    commands = [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    assert commands[:2] == ["make serve", "make test"]


def test_tests_that_pages_name_are_there() -> None:
    """`docs/compatibility.md` says which test would fail without what. Which file a test is in may change."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    known = {found for path in (ROOT / "tests").rglob("test_*.py") for found in _TEST.findall(path.read_text())}
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 150
    assert not named - known


def test_each_test_of_the_log_is_made_over_all_topologies_or_says_why_not() -> None:
    """A file that is split or new must not be left out in silence."""
    tests = ROOT / "tests"
    over_the_log = {
        f"integration/{path.stem}"
        for path in (tests / "integration").glob("test_*.py")
        if re.search(r"\b(fresh_log_url|cluster: Cluster)\b", path.read_text())
    }
    assert set(every_topology.SERVICES) == over_the_log
    contract = {f"contract/{path.stem}" for path in (tests / "contract").glob("test_*.py")}
    assert set(every_topology.CONTRACT) == contract - {"contract/test_backends"}
    elsewhere = {f"e2e/test_{name}" for names in every_topology.OVER_ONE_SERVER.values() for name in names}
    whole = {f"e2e/{path.stem}" for path in (tests / "e2e").glob("test_*.py")}
    assert set(every_topology.WHOLE) | elsewhere == whole
    assert not set(every_topology.WHOLE) & elsewhere


def test_long_tests_are_left_out_by_one_verb_and_run_by_another() -> None:
    """CI runs both verbs, and `make test-long` looks for them in every folder that has one.

    It runs those of Hypothesis again, with all examples: `make test` tries some of them.
    """
    makefile = (ROOT / "Makefile").read_text()
    recipes = {name: re.search(rf"(?m)^{name}: .*\n((?:\t.*\n)+)", makefile)[1] for name in ("test", "test-long")}  # type: ignore[index]
    assert [line.count(" -m 'not long' ") for line in recipes["test"].splitlines()] == [1, 1]
    assert " -m 'long or hypothesis' " in recipes["test-long"]
    assert "EXAMPLES" not in recipes["test-long"]
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    tops = {path: "/".join(path.relative_to(ROOT).parts[:2]) for path in files}
    long = {top for path, top in tops.items() if re.search(r"mark\.long\b", files[path])}
    tried = {top for path, top in tops.items() if re.search(r"(?m)^from hypothesis", files[path])}
    assert len(long) > 1 < len(tried)
    assert long | tried == set(re.findall(r"tests/\w+", recipes["test-long"]))
    fixed = [str(path) for path in files if re.search(r"max_examples=\d", files[path])]
    assert not fixed, "the number comes from examples() of tests/rigs/example_counts.py"
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make test", "make test-long"} <= set(commands)


def test_files_of_tests_that_start_first_are_there() -> None:
    """Their names in tests/conftest.py: one that is not there would be sorted as any other, and nobody would notice."""
    tests = ROOT / "tests"
    (first,) = (
        ast.literal_eval(node.value)
        for node in _parsed(tests / "conftest.py").body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["_FIRST"]
    )
    assert first
    assert [name for name in first if not (tests / name).is_file()] == []
