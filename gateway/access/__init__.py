"""Access control: tenants, restricted APIs, and the terms on which requests are accepted.

Pure but for `tenants`, which reads the file of keys and the clock. May import `requests`. Begin reading at `tenants`.
"""
