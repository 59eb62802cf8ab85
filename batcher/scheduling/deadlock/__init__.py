"""The wait graph of calls between models: which call holds what and waits for what, and which waits never end. May
import nothing but the kernel. Begin reading at `waits`, then `wait_cycles`.
"""
