"""The journal as evidence: proves its hash chain unbroken, and exports its facts as files (ADR 0061).

May import `queued` and `text.rendering` of its parent. Begin reading at `chain_verification`, or for files at
`history_commands`.
"""
