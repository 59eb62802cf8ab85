"""Turns what users of other servers have into models of a repository (`charonia migrate`). Runs none of their code.

May import the kernel's `models` and `errors`, and `protos`. Begin reading at `migrating`.
"""
