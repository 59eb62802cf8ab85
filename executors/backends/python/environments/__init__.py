"""The python environment that a model asks for: unpacked once, and entered by the model's process.

May import nothing else of executors. Begin reading at `environments`.
"""
