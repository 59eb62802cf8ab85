"""The contract suite for backends of others.

May import `backend` and what that imports. Begin reading at `backend_contract`.
"""
