"""The story of one request: what happened to it, why it waited, and what is known of its answer's way to its caller.

`request_reading` reads what the log has (`journal_reading`, within a bound), `request_story` explains it, with
`answer_delivery`; those two are pure.

May import the operators' commands, the log, and what lies below; of the console, its viewers alone. Begin reading at
`request_story`.
"""
