"""Checks a model repository without a server (`charonia check`): every fault with its place, and safe corrections.

May import `loading` and below, whose code decides what is a fault. Begin reading at `repository_check`.
"""
