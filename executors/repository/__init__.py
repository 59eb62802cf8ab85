"""Model repositories: lists models and reads their files.

May import `configuration`, and reads files; object stores are in `remote`. Begin reading at `model_repository`, then
`model_directory`.
"""
