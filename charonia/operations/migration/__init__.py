"""Converts models of other servers to models of a repository (`charonia migrate`), without running their code.

May import the kernel's `models` and `errors`, and `protos`. Begin reading at `migrating`.
"""
