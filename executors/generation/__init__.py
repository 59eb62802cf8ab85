"""Continuous batching: many requests that generate text share each step of one decoder.

    engine    the interfaces: an engine that admits requests and makes steps, and the decoder below it

May import `charonia.generation` and below. Begin reading at `engine`.
"""
