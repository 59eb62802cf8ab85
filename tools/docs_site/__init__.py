"""`make docs`: the pages of the repository, its HTTP interface, options and client as one searchable site (ADR 0054).

Begin reading at `__main__`. `navigation` says which page stands where, `pages` copies them and makes links,
`http_pages`, `option_pages` and `client_page` write the references, `built_links` checks what was built. `conf` and
`static` are Sphinx's.
"""
