"""`charonia replay`: asks a candidate version what clients have asked, and compares its answers with theirs (ADR 0060).

May import of the kernel all but `composition`, `inprocess` and the command, and no service. Begin reading at
`replay_lines`, which says what can be asked again and in which order. `candidate_answers` asks, the comparison is
`charonia.releases.answer_differences`, `difference_report` adds up, `replay_options` has the options, and
`replay_command` is the command. Gateways record (`gateway.releases.request_recorder`). How it is used:
`docs/howto/release.md`.
"""
