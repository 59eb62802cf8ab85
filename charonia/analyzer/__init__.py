"""`charonia bench`: measures how fast a model of any KServe v2 server is, with perf_analyzer's options and figures.

May import of the kernel `client`, `datatypes`, `errors`, `tensors` and `operations.text`, and `protos`; no service and
no log. Begin reading at `benching`: it reads the options (`bench_options`), asks the server about the model, builds
the requests once (`input_data`, `encoded_requests`) and measures each level. Worker processes (`load_worker`) send the
load (`load_loop`, `send_schedule`) over HTTP (`http1_lane`) or gRPC (`http2_lane`). What they saw is added up in
`window_figures` with `latency_histogram`, judged by `stability`, and shown by `bench_report` and `report_page`.
How it is used: `docs/howto/bench.md`.
"""
