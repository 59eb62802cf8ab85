"""Model repositories: which models there are, and the files of each.

May import `configuration`, and touches files; object stores are in `remote`. Begin reading at `model_repository`, then
`model_directory`.
"""
