"""Every documented complaint about a configuration, word for word, and which kind of failure it is (C62)."""

from __future__ import annotations

import pytest

from charonia.models.config_forms import parse
from executors.configuration.config import (
    InstanceError,
    StructureError,
    normalise,
    poll_failure,
    validate,
    validate_instances,
    validate_structure,
)
from executors.configuration.validation import check_reshapes

HEAD = 'name: "m" backend: "onnxruntime" '
IO = "input { name: 'x' data_type: TYPE_FP32 dims: [3] } output { name: 'y' data_type: TYPE_FP32 dims: [3] } "
BATCHED = HEAD + "max_batch_size: 8 "
SEQUENCE = BATCHED + "sequence_batching { %s }"
START = "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_START %s } }"
ENSEMBLE = 'name: "m" platform: "ensemble" '
STEP = "step { model_name: 'a' input_map { key: 'i' value: 'x' } output_map { key: 'o' value: 'y' } }"
CACHED = BATCHED + "response_cache { enable: true } "

STRUCTURE = [
    # C1, C2, C4
    (
        'name: "other" backend: "python"',
        "unexpected directory name 'm' for model 'other', directory name must equal model name",
    ),
    ('name: "m"', "must specify 'platform' or 'backend' for 'm'"),
    (HEAD + "max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
    # C26
    (HEAD + "model_metrics { metric_control { } }", "metric control must specify 'metric_identifier'"),
    (
        HEAD + "model_metrics { metric_control { metric_identifier { } } }",
        "metric identifier must specify non-empty 'family'",
    ),
    (
        HEAD + "model_metrics { metric_control { metric_identifier { family: 'f' } } }",
        "metric control must specify 'histogram_options'",
    ),
    (
        HEAD + "model_metrics { metric_control { metric_identifier { family: 'f' } histogram_options { } } }",
        "histogram options must specify non-empty 'buckets'",
    ),
    # C32
    (
        BATCHED + "dynamic_batching { preferred_batch_size: [4, 0] }",
        "dynamic batching preferred size must be positive for m",
    ),
    (
        BATCHED + "dynamic_batching { preferred_batch_size: 9 }",
        "dynamic batching preferred size must be <= max batch size for m",
    ),
    (BATCHED + "dynamic_batching { priority_levels: 3 }", "default priority level must be in range [1, 3] for m"),
    (
        BATCHED + "dynamic_batching { priority_levels: 3 default_priority_level: 4 }",
        "default priority level must be in range [1, 3] for m",
    ),
    (
        BATCHED + "dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 1"
        " priority_queue_policy { key: 0 value { } } }",
        "priority queue policy must have priority level in range [1, 18446744073709551615] for m",
    ),
    (
        BATCHED + "dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }",
        "Only one priority level is allowed when 'preserve_ordering' is true for m",
    ),
    (
        BATCHED + "dynamic_batching { preserve_ordering: true"
        " default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 } }",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
    (
        BATCHED + "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1"
        " priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 5 } } }",
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
    ),
    # C42, C43
    (SEQUENCE % "control_input { control { } }", "sequence batching control tensor must have a name for m"),
    (
        SEQUENCE % (START % "int32_false_true: [0, 1]" + "control_input { name: 'S' }"),
        "sequence batching control tensor 'S' is specified for multiple control kinds for m",
    ),
    (
        SEQUENCE % ("control_input { name: 'S' control { int32_false_true: [0, 1] } control { kind: 1 } }"),
        "sequence batching control tensor 'S' is specified for multiple control kinds for m",
    ),
    (
        SEQUENCE % (START % "int32_false_true: [0, 1]" + (START % "int32_false_true: [0, 1]").replace("'S'", "'T'")),
        "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
    ),
    (
        SEQUENCE % (START % ""),
        "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_START for m",
    ),
    (
        SEQUENCE % (START % "int32_false_true: [0, 1] fp32_false_true: [0, 1]"),
        "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' "
        "for CONTROL_SEQUENCE_START for m",
    ),
    (
        SEQUENCE % (START % "int32_false_true: [0]"),
        "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
    ),
    (
        SEQUENCE % (START % "bool_false_true: [false, true, true]"),
        "sequence batching control 'bool_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
    ),
    (
        SEQUENCE % "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }",
        "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
        "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
    ),
    (
        SEQUENCE % "direct { minimum_slot_utilization: 1.5 }",
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    ),
    (
        SEQUENCE % "oldest { preferred_batch_size: 0 }",
        "sequence batching preferred batch size must be positive for m",
    ),
    (
        SEQUENCE % "oldest { preferred_batch_size: 9 }",
        "sequence batching preferred batch size must be <= max batch size for m",
    ),
    # C51
    (ENSEMBLE, "ensemble scheduling must be set for ensemble 'm' whose platform is 'ensemble'"),
    (ENSEMBLE + "ensemble_scheduling { }", "must specify 'step' for ensemble 'm'"),
    (
        ENSEMBLE + "instance_group { } ensemble_scheduling { }",
        "instance group should not be specified for ensemble 'm'",
    ),
    (ENSEMBLE + "optimization { } ensemble_scheduling { }", "optimization should not be specified for ensemble 'm'"),
    (ENSEMBLE + "model_warmup { } ensemble_scheduling { }", "model_warmup can not be specified for ensemble 'm'"),
    (ENSEMBLE + "ensemble_scheduling { step { } }", "must specify 'model_name' in step 0 of ensemble 'm'"),
    (
        ENSEMBLE + "ensemble_scheduling { step { model_name: 'a' } }",
        "must specify 'input_map' in step 0 of ensemble 'm'",
    ),
    (
        ENSEMBLE + "ensemble_scheduling { step { model_name: 'a' input_map { key: 'i' value: 'x' } } }",
        "must specify 'output_map' in step 0 of ensemble 'm'",
    ),
    (
        ENSEMBLE + IO + "ensemble_scheduling {" + STEP + STEP + "}",
        "ensemble tensor 'y' can appear in an output map only once for ensemble 'm' step 1",
    ),
    (
        ENSEMBLE + IO.replace("'x'", "'z'") + "ensemble_scheduling {" + STEP + "}",
        "ensemble input 'z' for ensemble m is not used",
    ),
    (
        ENSEMBLE + IO.replace("'y'", "'z'") + "ensemble_scheduling {" + STEP + "}",
        "ensemble output 'z' for ensemble m is not used",
    ),
    (
        ENSEMBLE
        + IO
        + "ensemble_scheduling {"
        + STEP.replace("output_map {", "output_map { key: 'p' value: 'q' } output_map {")
        + "}",
        "ensemble tensor 'q' is unused in ensemble 'm'",
    ),
    (
        ENSEMBLE + IO + "ensemble_scheduling {" + STEP.replace("'x'", "'y'") + STEP.replace("'y'", "'q'") + "}",
        "output 'y' for ensemble 'm' is not written",
    ),
    (
        ENSEMBLE
        + IO
        + "ensemble_scheduling {"
        + STEP.replace("input_map {", "input_map { key: 'j' value: 'q' } input_map {")
        + STEP.replace("'y'", "'q'").replace("input_map {", "input_map { key: 'j' value: 'r' } input_map {")
        + "}",
        "output 'y' for ensemble 'm' is not written: at least one of its depending tensors, 'r', is not connected",
    ),
    (
        ENSEMBLE
        + IO
        + "ensemble_scheduling {"
        + STEP
        + STEP.replace("'x'", "'q'").replace("'y'", "'r'")
        + STEP.replace("'x'", "'r'").replace("'y'", "'q'")
        + "}",
        "ensemble tensor 'q' is unused in ensemble 'm'",
    ),
    # C63
    (
        CACHED + "sequence_batching { }",
        "Response Cache does not currently support model m with sequence batching scheduler. "
        "Please disable the response cache.",
    ),
    (
        CACHED + "model_transaction_policy { decoupled: true }",
        "Response Cache does not currently support model m with 'decoupled' transaction policy. "
        "Please disable the response cache.",
    ),
]


@pytest.mark.parametrize(("text", "message"), STRUCTURE)
def test_structural_errors(text: str, message: str) -> None:
    with pytest.raises(StructureError) as caught:
        validate_structure(parse(text), "m")
    assert caught.value.message == message


def _input(fields: str) -> str:
    return "input { name: 'x' data_type: TYPE_FP32 " + fields + " } "


CPU = "instance_group { name: 'g' kind: KIND_CPU count: 1 } "
INSTANCE = [
    # C5, C6
    (CPU + "input { }", "model input must specify 'name' for m"),
    (CPU + "input { name: 'x' }", "model input 'x' must specify 'data_type' for m"),
    (CPU + "input { name: 'x' data_type: TYPE_FP32 }", "model input 'x' must specify 'dims' for m"),
    (CPU + "output { }", "model output must specify 'name' for m"),
    (CPU + "output { name: 'x' }", "model output 'x' must specify 'data_type' for m"),
    (CPU + "output { name: 'x' data_type: TYPE_FP32 }", "model output 'x' must specify 'dims' for m"),
    (
        CPU + _input("dims: 0"),
        "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        CPU + _input("dims: -2"),
        "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (CPU + _input("dims: [2, 3] format: FORMAT_NHWC"), "model input NHWC/NCHW require 3 dims for m"),
    (CPU + _input("dims: 2 is_shape_tensor: true"), "shape tensors are only supported for TensorRT platform for m"),
    (
        CPU + _input("dims: 2 is_non_linear_format_io: true"),
        "Non-linear IO format is only supported for the TensorRT platform for m",
    ),
    # C7
    (
        CPU + _input("dims: [2, 3] reshape { shape: 5 }"),
        "model input 'x' has different size for dims and reshape for m",
    ),
    (CPU + _input("dims: 6 reshape { shape: -1 }"), "model input 'x' has different size for dims and reshape for m"),
    (
        CPU + _input("dims: [2, -1, 3] reshape { shape: [3, -1, 2] }"),
        "model input 'x' has different size for dims and reshape for m",
    ),
    (
        CPU + _input("dims: [-1, -1] reshape { shape: -1 }"),
        "model input 'x' has different number of variable-size dimensions for dims and reshape for m",
    ),
    (
        CPU + _input("dims: 2 reshape { shape: [2, 0] }"),
        "model input 'x' reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for m",
    ),
    (
        CPU + _input("dims: 1 reshape { }"),
        "model input 'x' cannot have empty reshape for non-batching model as scalar tensors are not supported for m",
    ),
    (
        CPU + "max_batch_size: 2 " + _input("dims: 2 reshape { }"),
        "model input 'x' has different size for dims and reshape for m",
    ),
    # C9
    ("", "must specify one or more 'instance group's for m"),
    (
        "instance_group { name: 'g' kind: KIND_MODEL gpus: 0 }",
        "instance group g of model m has kind KIND_MODEL but specifies one or more GPUs",
    ),
    (
        "instance_group { name: 'g' kind: KIND_CPU gpus: 0 }",
        "instance group g of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
    (
        "instance_group { name: 'g' kind: KIND_GPU gpus: 0 }",
        "instance group g of model m specifies invalid or unsupported gpu id 0. GPUs with at least the minimum "
        "required CUDA compute compatibility of 6.000000 are: ",
    ),
    (
        "instance_group { name: 'g' kind: KIND_GPU }",
        "instance group g of model m has kind KIND_GPU but no GPUs are available",
    ),
    (
        "instance_group { name: 'g' kind: KIND_CPU profile: 'p' }",
        "instance group g of model m and platform specifies profile field which is only supported for TensorRT models",
    ),
    # C20, C21
    (CPU + IO + "batch_input { }", "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m"),
    (CPU + IO + "batch_input { source_input: 'q' }", "unknown source input name 'q' for m"),
    (CPU + IO + "batch_input { source_input: 'x' }", "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
    (CPU + IO + "batch_output { source_input: 'x' target_name: 'q' }", "unknown target output name 'q' for m"),
    (
        CPU + IO + "batch_output { source_input: 'x' target_name: ['y', 'y'] }",
        "target output name 'y' can only be specified once for m",
    ),
    # C12, C17
    (
        CPU + "default_model_filename: '../n/1/model.onnx'",
        "model file path '../n/1/model.onnx' in model 'm' is outside model directory",
    ),
    (
        CPU + IO + "model_warmup { name: 'w' }",
        "[request id: <id_unknown>] expected 1 inputs but got 0 "
        "inputs for model 'm'. Got input(s) [], but missing required input(s) ['x']. Please provide all "
        "required input(s).",
    ),
    (
        CPU + IO + "model_warmup { name: 'w' inputs { key: 'x' value { data_type: TYPE_FP32 dims: 3 "
        "input_data_file: '/etc/passwd' } } }",
        "warmup file path '/etc/passwd' in model 'm' is outside model directory",
    ),
    (
        CPU + IO + "model_warmup { name: 'w' inputs { key: 'x' value { data_type: TYPE_INT8 dims: 3 "
        "zero_data: true } } }",
        "[request id: <id_unknown>] inference input 'x' data-type is 'INT8', but model 'm' expects 'FP32'",
    ),
    (
        CPU + IO + "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: 3 } } }",
        "[request id: <id_unknown>] warmup setting expects input 'x' to have input_data_type set",
    ),
    (
        CPU + IO + "model_warmup { inputs { key: 'x' value { data_type: TYPE_FP32 dims: -1 zero_data: true } } }",
        "warmup setting expects all variable-size dimensions are specified for input 'x'",
    ),
    (
        CPU + IO + "model_warmup { name: 'w' inputs { key: 'x' value { data_type: TYPE_FP32 dims: 4 "
        "zero_data: true } } }",
        "[request id: <id_unknown>] unexpected shape for input 'x' for model 'm'. Expected [3], got [4]. ",
    ),
    (
        CPU + IO + "model_warmup { name: 'w' batch_size: 2 }",
        "model warmup 'w' of model 'm' has batch size 2, but the model's maximum is 1",
    ),
]

STATE = "state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 dims: [2, -1] %s } "
INITIAL = "initial_state { name: 'n' data_type: TYPE_FP32 dims: [2, 3] zero_data: true } "
STATES = [
    (
        STATE % (INITIAL * 2),
        "initial_state field for state input 'i' must contain exactly one or zero element. Found '2' elements.",
    ),
    (
        STATE % INITIAL.replace("name: 'n' ", ""),
        "Field 'name' must be set when using initial_state for state input 'i'.",
    ),
    ((STATE % "") * 2, "State input name 'i' specified more than once."),
    (
        STATE % INITIAL.replace("FP32", "INT8"),
        "The data type used for 'initial_state' field of state 'i' does not match the state data type.",
    ),
    (
        STATE % INITIAL.replace("[2, 3]", "[2, -1]"),
        "'initial_state' field for state input name 'i' contains variable dimensions.",
    ),
    (
        STATE % INITIAL.replace("[2, 3]", "[2]"),
        "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input name "
        "'i'. 1 != 2",
    ),
    (
        STATE % INITIAL.replace("[2, 3]", "[3, 3]"),
        "'initial_state' dim for input name 'i' doesn't match 'state' dim description. 3 != 2",
    ),
    (
        STATE % INITIAL.replace("zero_data: true", ""),
        "initial_state setting expects state'i' to have state_data set",
    ),
]
INSTANCE += [(CPU + "sequence_batching {" + states + "}", message) for states, message in STATES]


@pytest.mark.parametrize(("text", "message"), INSTANCE)
def test_instance_errors(text: str, message: str) -> None:
    with pytest.raises(InstanceError) as caught:
        validate_instances(parse(HEAD + text))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("group", "gpus", "message"),
    [
        ("", 2, "instance group g of model m has kind KIND_GPU but specifies no GPUs"),
        (
            "gpus: 2",
            2,
            "instance group g of model m specifies invalid or unsupported gpu id 2. GPUs with at least the "
            "minimum required CUDA compute compatibility of 6.000000 are: 0, 1",
        ),
    ],
)
def test_instance_errors_with_devices(group: str, gpus: int, message: str) -> None:
    config = parse(HEAD + "instance_group { name: 'g' kind: KIND_GPU " + group + " }")
    with pytest.raises(InstanceError) as caught:
        validate_instances(config, gpus=gpus)
    assert caught.value.message == message


@pytest.mark.parametrize(
    "text",
    [
        HEAD + IO,
        BATCHED + IO + "dynamic_batching { preferred_batch_size: [4, 8] max_queue_delay_microseconds: 100 }",
        BATCHED + "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
        BATCHED + "dynamic_batching { priority_levels: 18446744073709551615 default_priority_level: 1 }",
        BATCHED + _input("dims: [2, -1, 6] reshape { shape: [2, 1, -1, 3, 2] }"),
        BATCHED + _input("dims: 1 reshape { }"),
        BATCHED + "sequence_batching { oldest { } " + START % "fp32_false_true: [0, 1]" + STATE % INITIAL + "}",
        ENSEMBLE + IO + "ensemble_scheduling {" + STEP + "}",
        HEAD + IO + "model_warmup { name: 'w' inputs { key: 'x' value { data_type: TYPE_FP32 dims: 3 zero_data: true }"
        " } }",
        HEAD + "instance_group { kind: KIND_GPU }",
    ],
)
def test_good_configurations_pass(text: str) -> None:
    validate(normalise(parse(text), gpus=1), "m", gpus=1)


def test_text_for_clients_of_a_structural_error() -> None:
    assert poll_failure("m") == "failed to load 'm', failed to poll from model repository"


def test_a_reshape_is_judged_by_itself() -> None:
    """C7 before anything is compared with it, when the rest may be missing still."""
    check_reshapes(parse("name: 'm' input { name: 'a' } output { name: 'b' dims: 4 reshape { shape: [2, 2] } }"))
    for what in ("input", "output"):
        with pytest.raises(InstanceError) as refused:
            check_reshapes(parse(f"name: 'm' {what} {{ name: 'a' dims: [2, 2] reshape {{ shape: 5 }} }}"))
        assert refused.value.message == f"model {what} 'a' has different size for dims and reshape for m"
