"""Tests that others wrote for their OpenAI API, run against `charonia serve`: vLLM's and those of Triton's frontend.

Neither is part of this repository: the command takes the path of their sources. `running` copies the tests, starts
what they ask and reads their results; `vllm_tests` and `triton_tests` are plug-ins of pytest that stand for what the
tests import of the server they were written for. `exceptions.toml` says which are not expected to pass, and why.
"""
