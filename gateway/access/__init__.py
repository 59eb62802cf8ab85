"""Access control: tenants, restricted APIs, and the terms on which requests are accepted.

Pure; may import `requests`. Begin reading at `tenants`.
"""
