"""Who holds what and who waits for what, and which of those waits can never end.

May import nothing but the kernel. Begin reading at `waits`, then `wait_cycles`.
"""
