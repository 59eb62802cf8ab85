from memory_objects import objects

__all__ = ["objects"]
