"""Model repositories in object stores (interface item R7): listed there, copied here, read like any other.

`store_addresses` and `credentials` say where and as whom, `store` is what a provider's adapter must do, `copies` are
the files on this machine, `root` makes a repository of them. Providers' libraries are imported when a repository needs
them.
"""
