"""Turns a model's files into instances that are ready to execute.

May import `running` and below. Begin reading at `loader`.
"""
