"""Explains the errors of a load: which field each is about, what was expected there, and what to write instead.

The errors' texts are part of the interface, so that they can be recognised. One that no row knows is explained by its
own text, at the field that it names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .corrections import words_of
from .faults import Place
from .field_positions import FieldNode, Step, find, line_and_column, read_fields

_SYNTAX = re.compile(r"^(?P<file>[^\n:]+\.pbtxt):(?P<line>\d+):(?P<column>\d+) : (?P<reason>.*)$", re.DOTALL)
_RULE = re.compile(r"must be ((?:an? |one of |between |at least ).+?)(?:, (?:got|not|but) .*)?$", re.DOTALL)
_TENSOR = r"model (?P<list>input|output) '(?P<name>[^']*)'"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where an error is, what was expected and what to write instead."""

    place: Place
    expected: str
    instead: str


@dataclass(frozen=True, slots=True)
class _Row:
    """`path` is dotted; `{group}` stands for a group of `pattern`, `list[key=value]` for the repetition that has it."""

    pattern: str
    path: str
    expected: str
    instead: str


_ROWS = (
    _Row(r"unexpected directory name '(?P<name>[^']*)' for model", "name", "the name of the directory, or no name",
         'name: "{name}", or nothing'),
    _Row(r"must specify 'platform' or 'backend'", "backend", "a backend, or a file that tells it",
         'backend: "onnxruntime" or backend: "python", or the usual file name in the version directory'),
    _Row(r"unexpected platform type", "platform", "a platform of Triton's",
         'platform: "onnxruntime_onnx", or a backend'),
    _Row(r"unexpected 'platform' and 'backend' pair", "platform", "a platform of the backend that is written",
         "one of the two"),
    _Row(r"unable to find (Python )?backend", "backend", "a backend that is installed",
         'backend: "onnxruntime" or backend: "python", or install the distribution that has it'),
    _Row(r"'max_batch_size' must be non-negative", "max_batch_size", "0 or more",
         "max_batch_size: 0 for a model without a batch dimension"),
    _Row(r"for the model to support batching", "max_batch_size", "a file whose first dimensions are all dynamic",
         "max_batch_size: 0 and dims with the file's first dimension, or export the file with a dynamic one"),
    _Row(r"at least one version must be available", "version_policy", "a version directory that the policy selects",
         "a directory 1 with the model's file, or another version_policy"),
    _Row(_TENSOR + r" must specify 'data_type'", "{list}[name={name}].data_type", "a data type",
         "data_type: TYPE_FP32"),
    _Row(_TENSOR + r" must specify 'dims'", "{list}[name={name}].dims", "at least one dimension",
         "dims: [ 1 ]; -1 is a variable size"),
    _Row(_TENSOR + r" dimension must be", "{list}[name={name}].dims", "sizes of at least 1, or -1",
         "-1 for a variable size"),
    _Row(_TENSOR + r" .*reshape", "{list}[name={name}].reshape", "the same number of elements as in dims",
         "reshape { shape: [ ... ] } with the same product, or no reshape"),
    _Row(_TENSOR, "{list}[name={name}]", "", ""),
    _Row(r"model (?P<list>input|output) must specify 'name'", "{list}", "a name", 'name: "..."'),
    _Row(r"model input NHWC/NCHW require 3 dims", "input", "three dims with this format", "format: FORMAT_NONE"),
    _Row(r"(?P<list>input|output) '(?P<name>[^']*)' is specified more than once", "{list}[name={name}]", "it once",
         "one entry"),
    _Row(r"expects datatype \w+ for (?P<list>input|output) '(?P<name>[^']*)', model provides (?P<type>\w+)",
         "{list}[name={name}].data_type", "{type}, which the file has", "data_type: {type}"),
    _Row(r"unexpected inference (?P<list>input|output) '(?P<name>[^']*)', allowed \w+ are: (?P<all>.*)",
         "{list}[name={name}].name", "a tensor of the file: {all}", "one of these names"),
    _Row(r"tensor '(?P<name>[^']*)': the model expects (?P<count>\d+) dimensions \(shape (?P<shape>\[[^\]]*\])",
         "*[name={name}].dims", "the file's shape {shape}, without its first dimension if max_batch_size is above 0",
         "the file's dims, or no dims: they are read from it"),
    _Row(r"unknown source input name '(?P<name>[^']*)'", "batch_input.source_input", "an input of this model",
         "the name of an input"),
    _Row(r"(unknown target output name|target output name) '(?P<name>[^']*)'", "batch_output.target_name",
         "an output of this model, once", "the name of an output"),
    _Row(r"instance group (?P<name>\S+) of model \S+ has kind KIND_GPU but no GPUs", "instance_group.kind",
         "KIND_CPU or KIND_AUTO on a machine without a GPU", "kind: KIND_AUTO, or check with --gpus=N"),
    _Row(r"instance group (?P<name>\S+) of model \S+ has kind (?P<kind>\w+) but specifies one or more GPUs",
         "instance_group.gpus", "no gpus with {kind}", "kind: KIND_GPU, or no gpus"),
    _Row(r"instance group (?P<name>\S+) of model \S+ specifies invalid or unsupported gpu id (?P<id>-?\d+)",
         "instance_group.gpus", "GPUs of the machine", "gpus that there are, or check with --gpus=N"),
    _Row(r"dynamic batching preferred size", "dynamic_batching.preferred_batch_size", "sizes from 1 to max_batch_size",
         "smaller sizes, or a larger max_batch_size"),
    _Row(r"default priority level must be in range (?P<range>\[.*\])", "dynamic_batching.default_priority_level",
         "a level in {range}", "default_priority_level: 1"),
    _Row(r"priority queue policy must have priority level in range (?P<range>\[.*\])",
         "dynamic_batching.priority_queue_policy", "keys in {range}", "a key in {range}"),
    _Row(r"Only one priority level is allowed", "dynamic_batching.preserve_ordering", "one level with this order",
         "preserve_ordering: false, or no priority_levels"),
    _Row(r"Queue policy can not have DELAY", "dynamic_batching.default_queue_policy",
         "timeout_action: REJECT with preserve_ordering", "timeout_action: REJECT"),
    _Row(r"Response Cache does not", "response_cache", "no response cache with this scheduler or policy",
         "response_cache { enable: false }"),
    _Row(r"sequence batching preferred batch size", "sequence_batching.oldest.preferred_batch_size",
         "sizes from 1 to max_batch_size", "smaller sizes, or a larger max_batch_size"),
    _Row(r"sequence batching minimum slot utilization", "sequence_batching.direct.minimum_slot_utilization",
         "a share from 0.0 to 1.0", "minimum_slot_utilization: 0.5"),
    _Row(r"sequence batching control tensor must have a name", "sequence_batching.control_input", "a name",
         'name: "START"'),
    _Row(r"sequence batching control tensor '(?P<name>[^']*)' is specified for multiple control kinds",
         "sequence_batching.control_input[name={name}]", "one kind for each tensor", "a control_input for each kind"),
    _Row(r"sequence batching control tensor '(?P<name>[^']*)' must not be an input",
         "sequence_batching.control_input[name={name}]", "a tensor that is no input",
         "no such input: the server makes it"),
    _Row(r"sequence batching control '(?P<field>\w+)' must have exactly 2 entries", "sequence_batching.control_input",
         "{field} with two values, of false and of true", "{field}: [ 0, 1 ], or [ false, true ] of bool"),
    _Row(r"sequence batching (must specify either|specifies more than one)", "sequence_batching.control_input",
         "one of int32_false_true, fp32_false_true and bool_false_true", "int32_false_true: [ 0, 1 ]"),
    _Row(r"sequence batching specifies multiple (?P<kind>\w+) tensors", "sequence_batching.control_input",
         "one tensor of {kind}", "one control_input of the kind"),
    _Row(r"[Ss]tate input( name)? '(?P<name>[^']*)'", "sequence_batching.state[input_name={name}]", "", ""),
    _Row(r"initial_state|sequence batching state", "sequence_batching.state", "", ""),
    _Row(r"sequence batching", "sequence_batching", "", ""),
    _Row(r"must specify '(?P<field>\w+)' in step (?P<step>\d+) of ensemble", "ensemble_scheduling.step[{step}].{field}",
         "{field} in each step", "{field}"),
    _Row(r"must specify 'step' for ensemble", "ensemble_scheduling.step", "at least one step", "step [ ... ]"),
    _Row(r"ensemble input '(?P<name>[^']*)' .* is not used", "input[name={name}]", "a step that takes it",
         "the name in an input_map, or no such input"),
    _Row(r"(ensemble )?output '(?P<name>[^']*)' for ensemble", "output[name={name}]", "a step that writes it",
         "the name in an output_map, or no such output"),
    _Row(r"ensemble tensor '(?P<name>[^']*)'", "ensemble_scheduling.step", "one step that writes it, one that takes it",
         "the same name in an output_map and an input_map"),
    _Row(r"ensemble '?[^']*'? (depends on|contains models that are not available or ambiguous)",
         "ensemble_scheduling.step", "steps with models of this repository that load",
         "first what keeps that model from loading"),
    _Row(r"circular dependency between ensembles", "ensemble_scheduling.step", "ensembles without a circle",
         "another model in a step"),
    _Row(r"for ensemble", "ensemble_scheduling", "", ""),
    _Row(r"failed to open text file for read \S*/warmup/", "model_warmup", "a file in the model's folder warmup",
         "the name of such a file"),
    _Row(r"failed to open text file for read \S*/initial_state/", "sequence_batching.state",
         "a file in the model's folder initial_state", "the name of such a file"),
    _Row(r"failed to open text file for read (\S*/)?(?P<name>[^/:]+):", "output[label_filename={name}].label_filename",
         "a file of the model", "its path below the model's directory"),
    _Row(r"label file.*output '(?P<name>[^']*)'", "output[name={name}].label_filename", "a file of the model",
         "its path below the model's directory"),
    _Row(r"model warmup '(?P<name>[^']*)'", "model_warmup[name={name}]", "", ""),
    _Row(r"warmup setting '(?P<name>[^']*)'", "model_warmup[name={name}]", "", ""),
    _Row(r"there is no batch strategy", "parameters[key=charonia.batch_strategy]",
         "a strategy that ships or whose package is installed", 'string_value: "volume", or install the package'),
    _Row(r"the batch strategy '", "parameters[key=charonia.batch_strategy]", "", ""),
    _Row(r"(?P<key>charonia\.\w+)", "parameters[key={key}]", "", ""),
    _Row(r"Mismatched \w+ hash for file (?P<file>\S+), expect: \S+, got: (?P<hash>\w+)", "model_repository_agents",
         "{file} with the hash that is written", 'value: "{hash}", if this is the right file'),
    _Row(r"metric|histogram", "model_metrics", "", ""),
)  # fmt: skip


def explain(problem: str, text: str) -> Explanation:
    """Explain an error's text about a configuration's text."""
    if (syntax := _SYNTAX.match(problem)) is not None:
        return _explain_syntax(syntax, text)
    root = read_fields(text)
    for row in _ROWS:
        if (match := re.search(row.pattern, problem)) is not None:
            groups = match.groupdict()
            expected, instead = (_filled(part, groups) for part in (row.expected, row.instead))
            place = _place(text, root, path_of(row.path, groups, root))
            return Explanation(place, expected, instead) if expected else _by_text(place, problem)
    return _by_text(_place(text, root, _mentioned(problem, root)), problem)


def _by_text(place: Place, problem: str) -> Explanation:
    """The explanation of an error that no row explains."""
    if (rule := _RULE.search(problem)) is not None:
        return Explanation(place, rule[1], "such a value")
    expected = f"a value of {place.field} that can be loaded" if place.field else "a model that can be loaded"
    return Explanation(place, expected, "what the message asks for")


def _filled(text: str, groups: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: groups.get(match[1]) or match[0], text)


def path_of(path: str, groups: dict[str, str], root: FieldNode) -> list[Step]:
    """The steps of a row's path. The list "*" is the one of `input` and `output` that has the tensor."""
    steps: list[Step] = []
    for word in re.split(r"\.(?![^\[]*\])", path):  # at the dots outside of brackets
        name, bracket, inner = word.partition("[")
        name = _filled(name, groups)
        key, equals, value = inner.removesuffix("]").partition("=")
        value = _filled(value, groups)
        if name == "*":
            inputs = [node.value("name") for node in root.named("input")]
            name = "input" if value in inputs else "output"
        steps.append(name)
        if bracket:
            steps.append((key, value) if equals else int(_filled(key, groups)))
    return steps


def _place(text: str, root: FieldNode, path: Sequence[Step]) -> Place:
    node, dotted = find(root, path)
    if node is root:
        return Place(1, 1, dotted) if text else Place(0, 0, dotted)
    return Place(*line_and_column(text, node.start), dotted)


def _mentioned(problem: str, root: FieldNode) -> list[Step]:
    """The path of the first field at the top whose name the text mentions."""
    words = set(re.findall(r"\w+", problem))
    return [next((node.name for node in root.children if node.name in words and node.name != "name"), "")]


def _explain_syntax(match: re.Match[str], text: str) -> Explanation:
    line, column, reason = int(match["line"]), int(match["column"]), match["reason"]
    place = Place(line, column, _field_at(text, line, column))
    if found := re.search(r'Message type "([\w.]+)" has no field named "([^"]+)"', reason):
        return Explanation(place, f"a field of {found[1].rpartition('.')[2]}", f"one of: {allowed(found[1])}")
    if found := re.search(r'Enum type "([\w.]+)" has no value named "?(\w+)', reason):
        what = f"a value of {found[1].rpartition('.')[2]}, without quotes"
        return Explanation(place, what, f"one of: {allowed(found[1])}")
    if found := re.search(r"should not have multiple \"(\w+)\" fields", reason):
        return Explanation(place, f"{found[1]} once", "one of the two")
    if found := re.search(r'Field "(\w+)" is specified along with field "(\w+)"', reason):
        return Explanation(place, f"either {found[1]} or {found[2]}", "one of the two")
    if "parse integer" in reason or "out of range" in reason:
        return Explanation(place, "an integer in the field's range", "digits without quotes")
    if "Expected string" in reason or "ending quote" in reason:
        return Explanation(place, "a string in quotes on one line", '"..."')
    if "not UTF-8" in reason:
        return Explanation(place, "UTF-8", "the file saved as UTF-8")
    found = re.search(r'Expected "(.)"', reason)
    return Explanation(
        place, f"'{found[1]}'" if found else "protobuf's text format", found[1] if found else "field: value"
    )


def allowed(name: str) -> str:
    """The fields of a message, or the values of an enum."""
    return ", ".join(words_of(name.removeprefix("inference.")))


def _field_at(text: str, line: int, column: int) -> str:
    """The field whose text begins or has its value at a position; the word there if the text cannot be read so far."""
    lines = text.split("\n")
    if not 1 <= line <= len(lines):
        return ""
    offset = sum(len(before) + 1 for before in lines[: line - 1]) + column - 1
    inner, words = read_fields(text), []
    # a field that is not closed lasts to the end
    while holding := [node for node in inner.children if node.start <= offset < (node.value_end or len(text))]:
        inner = holding[0]
        words.append(inner.name)
    if words:
        return ".".join(words)
    word = re.match(r"\w+", text[offset:])
    return word.group() if word else ""
