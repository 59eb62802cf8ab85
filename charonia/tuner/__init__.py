"""`charonia tune`: finds the configuration of a model that serves most within limits of latency and memory.

May import of the kernel what the analyzer may, `models` and the analyzer itself, and `protos`; no service and no log.
Begin reading at `tuning`: it reads the options (`tune_options`), makes the dimensions of each model (`knobs`), and
asks a search (`configuration_search`, pure) for the next configuration. Each is measured (`trial_measurement`) on a
private `charonia serve` over a copy of the models (`trial_server`, `server_launcher`), judged by `verdict`, and kept in
a `checkpoint` that the next run goes on from. `tune_report` and `tune_page` show what was found.
How it is used: `docs/howto/tune.md`.
"""
