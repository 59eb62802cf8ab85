"""Turns a model's files into instances that are ready to work.

May import `running` and below. Begin reading at `loader`.
"""
