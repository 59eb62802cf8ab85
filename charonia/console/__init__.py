"""The console: pages that show what a server does now, and why a request was slow. They change
nothing, but for `actions`.

`web_app` answers requests with pages of `page_rendering`, whose values and updates are `live_pages`'; `readings`
collects figures while a page is open, from the metrics (`metric_samples`, `server_figures`) and the log (`log_views`);
`stories` explain one request. Templates, style sheets and scripts lie in `templates` and `static`; `static/vendored` is
written by `tools/vendor_console.py`.

May import the operators' commands, the log, and what lies below; no service. A function that composition passes decides
which caller may see what. jinja2 is imported by `page_rendering` alone, web libraries by `web_app` and `page_server`.
Begin reading at `web_app`.
"""
