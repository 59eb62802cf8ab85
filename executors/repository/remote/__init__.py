"""Model repositories in object stores (interface item R7): listed there, copied here, read like any other.

May import the rest of `repository`; a provider's library is imported when a repository needs it. Begin reading at
`root`; `store` is what a provider's adapter must do.
"""
