"""Model repositories in object stores (R7): their models are listed, copied to this machine, and read like local ones.

May import the rest of `repository`; a provider's library is imported when a repository needs it. Begin reading at
`root`, then `store`, the interface of a provider's adapter.
"""
