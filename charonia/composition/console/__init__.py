"""The console as a process: run by itself (`console_role`), or by `serve` behind its metrics port (`console_part`).

May import everything, as `charonia.composition`; `console_part` runs in the supervisor and imports no library. Begin
reading at `console_role`.
"""
