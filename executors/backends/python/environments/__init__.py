"""Python environments of models: finds and unpacks them, and starts model processes in them.

May import nothing else of executors. Begin reading at `environments`.
"""
