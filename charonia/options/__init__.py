"""Every option of the command line, and the settings of each role made from them.

May import `models` and `traces` for the values of options. Begin reading at `table`, then `settings` and
`role_settings`.
"""
