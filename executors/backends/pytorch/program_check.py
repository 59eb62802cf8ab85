"""Refuses an exported program whose loading would run code of its author's.

`torch.export.load` runs code in six ways: it unpickles anything in `*.pt` when the safe way fails, in weights and
constants marked `use_pickle`, and in custom objects; it evaluates the expressions of symbolic sizes and the guards as
Python; it calls any function of torch that a node names; and it writes names into the source of a module that it
compiles. So all of it is read first, by PyTorch's own reader of archives, and only what exports consist of passes
(ADR 0034). That reader refuses files outside of the archive's folder, where the unsafe form of older releases had them.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .tensor_names import Structure

_RECORDS = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/[\w.]+|extra/[\w./-]+|models/model\.json"
    r"|data/(weights|constants|sample_inputs)/[\w.]+"
)
_PAYLOADS = re.compile(r"(weight|tensor)_\d+")
_PLAIN = re.compile(r"[\w.:<>+\-/@$]*")
"""Names, types, devices: what can be no call, no literal and no second statement."""
_KEY = re.compile(r"[\w.:/-]+")
_FREE = frozenset({"metadata", "as_string", "as_strings"})
"""Texts that are never evaluated: where a node came from, and strings that are passed as such."""
_OPERATORS = re.compile(
    r"torch\.ops\.(aten|prims|prim|quantized|quantized_decomposed)\.(?!from_file)\w+(\.\w+)?"
    r"|torch\.ops\.higher_order\.(associative_scan|cond|flex_attention|invoke_subgraph|map_impl|scan|while_loop"
    r"|wrap_with_autocast|wrap_with_set_grad_enabled)"
    r"|_operator\.(add|and_|eq|floordiv|ge|getitem|gt|le|lshift|lt|mod|mul|ne|neg|or_|pos|pow|rshift|sub|truediv)"
    r"|math\.(ceil|floor|sqrt|trunc)|torch\.(_sym|sym)_\w+"
)
_EXPRESSIONS = frozenset(
    re.findall(
        r"\w+",
        """Abs Add And CeilDiv CeilToInt CleanDiv Eq Equality Float FloatPow FloatTrueDiv FloorDiv FloorToInt Ge
        GreaterThan Gt Identity IntTrueDiv Integer IsNonOverlappingAndDenseIndicator LShift Le LessThan Lt Max Min Mod
        ModularIndexing Mul Ne Not Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt
        StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where ceiling floor""",
    )
)
_MEASURES = frozenset({"size", "stride", "storage_offset", "dim", "numel"})
_GUARD = re.compile(r"[\w \[\]().,'=<>!+\-*/%]*")
_WORD = re.compile(r"[A-Za-z_]\w*|[\d.]+|-?inf")
_ARITHMETIC = (
    *(ast.Expression, ast.Load, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.keyword),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.And, ast.Or),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)


def find_fault(path: Path, torch: Any) -> str | None:
    """Why an exported program must not be loaded; None when it may be."""
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        names = [str(name) for name in reader.get_all_records()]
    except RuntimeError as error:
        return f"the archive is damaged: {str(error).splitlines()[0]}"
    if len({name.casefold() for name in names}) < len(names):
        return "it holds two files of one name"
    try:
        return next(_faults(reader, names, torch), None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SyntaxError) as error:
        return f"it is not what torch.export.save writes ({type(error).__name__}: {error})"


def _faults(reader: Any, names: list[str], torch: Any) -> Iterator[str]:
    for name in names:
        if not _RECORDS.fullmatch(name):
            yield f"it holds '{name}', which is no part of an exported program"
        elif name.endswith(".pt"):
            try:
                # an empty record stands for no example inputs
                content = reader.get_record(name)
                if content:
                    torch.load(io.BytesIO(content), weights_only=True)
            except Exception as error:
                yield f"'{name}' holds more than tensors ({str(error).splitlines()[0]})"
        elif name.endswith("_config.json"):
            for entry in json.loads(reader.get_record(name))["config"].values():
                if entry["use_pickle"] or not _PAYLOADS.fullmatch(entry["path_name"]):
                    yield f"'{name}' names a pickled or custom object, '{entry['path_name']}'"
        elif name.endswith(".json"):
            yield from _of_value("", json.loads(reader.get_record(name)))


def _of_value(key: str, value: Any) -> Iterator[str]:
    """The faults of the text of a program, wherever they are in it."""
    if key in _FREE:
        return
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _of_text("expr_str" if key == "range_constraints" else "", inner)
            if inner == "custom_obj_values" and item:
                yield "it uses custom objects"
            yield from _of_value(inner, item)
    elif isinstance(value, list):
        for item in value:
            yield from _of_value(key, item)
    elif isinstance(value, str):
        yield from _of_text(key, value)


def _of_text(key: str, text: str) -> Iterator[str]:
    if key == "expr_str":
        if not all(_is_arithmetic(node, _EXPRESSIONS) for node in ast.walk(ast.parse(text, mode="eval"))):
            yield f"the size '{text}' could be code"
    elif key == "guards_code":
        if not _GUARD.fullmatch(text) or not _is_guard(ast.parse(text, mode="eval").body):
            yield f"the guard '{text}' could be code"
    elif key in ("in_spec", "out_spec"):
        structure = Structure(text)
        for word in structure.results():
            if not all(_KEY.fullmatch(part) for part in re.split(r"[\[\]]+", word) if part):
                yield f"the key in '{word}' could be code"
    elif key in ("target", "as_operator"):
        if not _OPERATORS.fullmatch(text):
            yield f"the operator '{text}' is none that is allowed"
    elif not _PLAIN.fullmatch(text):
        yield f"the name '{text}' could be code"


def _is_arithmetic(node: ast.AST, functions: frozenset[str]) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in functions
        case ast.Constant(value=str() as text):
            return _WORD.fullmatch(text) is not None
        case ast.Constant(value=value):
            return isinstance(value, int | float)
        case ast.Name(id=name):
            return "__" not in name
        case _:
            return isinstance(node, _ARITHMETIC)


def _is_guard(node: ast.AST) -> bool:
    """Whether it only compares sizes of arguments, as in `L['x'].size()[0] == 3`."""
    match node:
        case ast.Call(func=ast.Attribute(value=measured, attr=attribute), args=[], keywords=[]):
            return attribute in _MEASURES and _is_guard(measured)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _EXPRESSIONS and all(map(_is_guard, arguments))
        case ast.Subscript(value=value, slice=index):
            return isinstance(index, ast.Constant) and _is_guard(index) and _is_guard(value)
        case ast.Attribute(value=ast.Name(id="math"), attr="inf"):
            return True
        case ast.Name(id=name):
            return name == "L"
        case ast.Constant(value=str() as text):
            return _KEY.fullmatch(text) is not None
        case ast.Constant(value=value):
            return value is None or isinstance(value, int | float)
        case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare():
            return isinstance(node, _ARITHMETIC) and all(
                (isinstance(child, _ARITHMETIC) and not isinstance(child, ast.expr)) or _is_guard(child)
                for child in ast.iter_child_nodes(node)
            )
        case _:
            return False
