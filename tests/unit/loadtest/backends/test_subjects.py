"""The subjects' configurations say what is measured."""

from __future__ import annotations

import numpy as np
import pytest

from charonia.models.config_forms import parse
from loadtest.backends.bare import LIBRARIES
from loadtest.backends.model_files import WRITERS
from loadtest.backends.subjects import ISOLATIONS, SUBJECTS, find
from loadtest.model import LoadTestError


@pytest.mark.parametrize("name", SUBJECTS)
def test_each_subject_has_a_file_a_library_and_a_configuration(name: str) -> None:
    subject = SUBJECTS[name]
    assert subject.file in WRITERS
    assert subject.library in LIBRARIES
    assert subject.isolations
    assert set(subject.isolations) <= set(ISOLATIONS)
    for isolation in subject.isolations:
        config = parse(subject.config(isolation))
        assert config.name == subject.model(isolation)
        assert config.parameters["charonia.isolation"].string_value == isolation
        assert config.max_batch_size >= subject.rows
        assert config.HasField("dynamic_batching") is bool(subject.batch)


def test_requests_differ_and_are_the_same_in_each_run() -> None:
    subject = SUBJECTS["fil_1"]
    first, again = subject.contents(), subject.contents()
    assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
    assert len({one.tobytes() for one in first}) == subject.bodies


def test_unknown_subjects_are_named() -> None:
    assert [one.name for one in find("fil_1,onnx_quick")] == ["fil_1", "onnx_quick"]
    with pytest.raises(LoadTestError, match="unknown subject nothing"):
        find("fil_1,nothing")
