"""Which versions this executor serves: decides loads and unloads, carries them out, and reports them.

May import every room below `service`. Begin reading at `deployment`, then `lifecycle`, the pure part.
"""
