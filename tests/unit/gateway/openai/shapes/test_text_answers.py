"""What a model says of its tokens, in the form of an answer."""

from __future__ import annotations

import small_tokenizers

from gateway.openai.shapes.text_answers import prompt_logprobs, token_logprobs


def test_candidates_that_the_tokenizer_does_not_have_are_called_as_the_model_calls_them() -> None:
    """Models may have more rows than their tokenizer has tokens."""
    tokenizer = small_tokenizers.byte_level()
    known, unknown = 5, tokenizer.vocabulary
    row = {
        str(known): {"logprob": -0.5, "rank": 1, "decoded_token": "?"},
        str(unknown): {"logprob": -1.0, "rank": 2, "decoded_token": "more"},
        str(unknown + 1): {"logprob": -2.0, "rank": 3, "decoded_token": None},
    }
    text = tokenizer.token_bytes(known).decode("utf-8", "replace")
    (found,) = token_logprobs([known], [row], 3, tokenizer.token_bytes)
    assert [name for name, _, _ in found.candidates] == [text, "more", ""]
    (prompt,) = prompt_logprobs([row], tokenizer.token_bytes)
    assert prompt is not None
    assert [one["decoded_token"] for one in prompt.values()] == [text, "more", ""]
