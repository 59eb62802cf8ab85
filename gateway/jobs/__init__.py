"""Jobs: requests that outlive the call that made them.

May import `dataplane` and below, and of webhooks what a job's view shows. Begin reading at `jobs`, then `job_queries`.
"""
