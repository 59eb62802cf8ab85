"""What requests for text ask for, by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from charonia.errors import InvalidArgument
from executors.generation.text_requests import TextRequest, prepare


def test_log_probabilities_of_a_prompt_that_are_not_returned() -> None:
    """They are not computed, so they have no bound either."""
    ids = (7,) * 5000
    unused: Any = None
    for sampling in ('{"prompt_logprobs": 20}', {"prompt_logprobs": 20}):

        def asked(*returns: str, sampling: Any = sampling) -> TextRequest:
            return TextRequest("", ids, sampling, False, False, frozenset(returns))

        prepared = prepare(asked(), unused, 10_000, seed=1)
        assert (prepared.prompt, prepared.parameters.prompt_logprobs) == (ids, None)
        with pytest.raises(InvalidArgument, match="prompt_logprobs=20 of 5000 tokens are more than 32768 candidates"):
            prepare(asked("prompt_logprobs"), unused, 10_000, seed=1)
    with pytest.raises(InvalidArgument, match="prompt_logprobs must be in"):
        prepare(TextRequest("", (7,), {"prompt_logprobs": 21}, False, False, frozenset()), unused, 10, seed=1)
    few = TextRequest("", (7,), {"prompt_logprobs": 20}, False, False, frozenset({"prompt_logprobs"}))
    assert prepare(few, unused, 10, seed=1).parameters.prompt_logprobs == 20
