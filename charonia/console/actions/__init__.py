"""What the console changes where `--console-actions` allows it: queues, jobs, dead letters, models (ADR 0059).

`orders` reads what a form asks for and says which callers may ask for it, `forgery` keeps forms of other sites out,
`performing` does it with the functions of the commands and of the API, `notices` keeps the message of its outcome for
the page that follows, and `action_routes` joins them. May import what `charonia.console` may, and of that only
`viewers`. Begin reading at `action_routes`.
"""
