"""`charonia simulate`: answers what-if questions from recorded requests, with the real scheduler and a made-up clock.

May import of the kernel all but `composition`, `inprocess` and the command, and of the services `batcher.scheduling`
alone: the prediction runs the scheduler that serves (ADR 0057). Begin reading at `recorded_requests`, the common form
of recordings: `trace_recording` reads it from trace files, `journal_recording` from journals. `service_times` fits how
long batches take, `machine_pauses` finds and places what stopped the machine, `simulated_run` drives the scheduler,
`processor_shares` says what the processors did, `shared_cores` slows what shares them, `what_if` holds the changes,
`run_figures` computes what is compared, `simulation_document` puts baseline and changes together, `simulation_page`
draws them, and `simulate_command` is the command, with the options of `simulate_options`. How it is used:
`docs/howto/simulate.md`.
"""
