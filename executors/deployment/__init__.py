"""The versions that this executor serves: decides on loads and unloads, carries them out, and announces them.

May import every room below `service`. Begin reading at `deployment`, then `lifecycle`, the pure part.
"""
