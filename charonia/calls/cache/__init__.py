"""The response cache: answers equal requests once, for all their callers. May import the rest of `calls`, which does
not import it back. Begin reading at `response_cache`.
"""
