"""The event log in one process's memory, for tests and rigs. Begin reading at `log`."""
