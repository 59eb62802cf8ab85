"""Fuzzing of all that reads bytes of strangers: `make fuzz`, and a short form as a test (`tests/fuzz`).

`targets` says what is fed and what must hold, `campaign` feeds it, `mutation` makes inputs where atheris is not
installed, `__main__` is the command. The corpus is `tests/fuzz/corpus`, a folder for each target.
"""
