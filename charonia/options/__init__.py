"""Every option of the command line, and the settings of each role that are made of them.

May import `models` and `traces` for the values that options have. Begin reading at `table`, then `settings` and
`role_settings`.
"""
