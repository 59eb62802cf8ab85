"""The typed view holds what the configuration says."""

from __future__ import annotations

from charonia.datatypes import DataType
from charonia.inference import LOWEST_PRIORITY
from charonia.models.config_forms import parse
from charonia.models.interface import InstanceGroup, ModelInterface, TensorSpec, Warmup, WarmupInput
from charonia.models.scheduling import DynamicBatching, QueuePolicy, TimeoutAction
from executors.configuration.config import normalise

CONFIG = """
name: "m" backend: "onnxruntime" platform: "onnxruntime_onnx" max_batch_size: 8
input { name: "z" data_type: TYPE_FP32 dims: [-1, 4] reshape { shape: [-1, 2, 2] } }
input { name: "a" data_type: TYPE_STRING dims: 1 reshape { } optional: true allow_ragged_batch: true }
output { name: "y" data_type: TYPE_BF16 dims: 5 label_filename: "labels.txt" }
output { name: "b" data_type: TYPE_INT64 dims: -1 }
dynamic_batching {
  preferred_batch_size: [8, 4, 8] max_queue_delay_microseconds: 7 preserve_ordering: true
  priority_levels: 18446744073709551615 default_priority_level: 9
  default_queue_policy { max_queue_size: 3 }
  priority_queue_policy { key: 2 value { timeout_action: DELAY default_timeout_microseconds: 10
    allow_timeout_override: true } }
}
instance_group { count: 2 kind: KIND_GPU gpus: [0, 1] passive: true host_policy: "p" }
parameters { key: "k" value { string_value: "v" } }
metric_tags { key: "team" value: "t" }
model_transaction_policy { decoupled: true }
model_warmup { name: "w" inputs { key: "z" value { data_type: TYPE_FP32 dims: [3, 4] input_data_file: "f" } }
               inputs { key: "a" value { data_type: TYPE_STRING dims: 1 zero_data: true } } }
"""


def test_everything_a_request_path_reads() -> None:
    interface = ModelInterface.of(normalise(parse(CONFIG), gpus=2))
    z = TensorSpec("z", DataType.FP32, (-1, 4), (-1, 2, 2))
    a = TensorSpec("a", DataType.BYTES, (1,), (), optional=True, allow_ragged_batch=True)
    y = TensorSpec("y", DataType.BF16, (5,), label_filename="labels.txt")
    assert list(interface.inputs.items()) == [("z", z), ("a", a)]
    assert list(interface.outputs.items()) == [("y", y), ("b", TensorSpec("b", DataType.INT64, (-1,)))]
    assert interface.required_inputs == {"z"}
    assert interface.has_ragged_input
    assert (interface.client_shape(z), interface.backend_shape(z)) == ((-1, -1, 4), (-1, -1, 2, 2))
    assert (interface.client_shape(a), interface.backend_shape(a)) == ((-1, 1), (-1,))
    assert interface.instance_groups == (InstanceGroup("m_0", 2, "KIND_GPU", (0, 1), passive=True, host_policy="p"),)
    assert interface.parameters == {"k": "v"}
    assert interface.metric_tags == {"_team": "t"}
    assert (interface.scheduling, interface.decoupled, interface.batching) == ("dynamic_batching", True, True)
    assert interface.default_model_filename == "model.onnx"
    assert interface.warmups == (
        Warmup(
            "w",
            1,
            1,
            {
                "a": WarmupInput(DataType.BYTES, (1,), "zero"),
                "z": WarmupInput(DataType.FP32, (3, 4), "file", "f"),
            },
        ),
    )


def test_dynamic_batching() -> None:
    interface = ModelInterface.of(normalise(parse(CONFIG)))
    delaying = QueuePolicy(TimeoutAction.DELAY, 10, allow_timeout_override=True)
    block = DynamicBatching((4, 8), 7, True, 2**64 - 1, 9, QueuePolicy(max_queue_size=3), {2: delaying})
    assert interface.dynamic_batching == block
    assert [block.level(priority) for priority in (0, 1, 2**64 - 1)] == [9, 1, 2**64 - 1]
    assert block.queue_policy(2) is delaying
    assert block.queue_policy(1).max_queue_size == 3
    assert DynamicBatching().level(5) == 0
    assert block.level(LOWEST_PRIORITY) == LOWEST_PRIORITY
    few = DynamicBatching(priority_levels=3, default_priority_level=2)
    assert [few.level(priority) for priority in (3, 4, 2**64 - 1, LOWEST_PRIORITY)] == [3, 2, 2, 3]


def test_an_override_can_only_shorten_a_timeout() -> None:
    policy = QueuePolicy(default_timeout_us=10, allow_timeout_override=True)
    assert [policy.timeout_us(asked) for asked in (0, 5, 10, 50)] == [10, 5, 10, 10]
    assert QueuePolicy(default_timeout_us=10).timeout_us(5) == 10
    assert QueuePolicy(allow_timeout_override=True).timeout_us(5) == 0


def test_a_model_without_batching_has_no_leading_dimension() -> None:
    interface = ModelInterface.of(normalise(parse("name: 'm' backend: 'python'")))
    spec = TensorSpec("x", DataType.INT8, (2, 3))
    assert interface.client_shape(spec) == interface.backend_shape(spec) == (2, 3)
    assert (interface.scheduling, interface.dynamic_batching, interface.batching) == ("default", None, False)
