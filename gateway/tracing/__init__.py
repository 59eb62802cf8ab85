"""Which requests of this gateway are traced, and where their traces go.

May import no other room of the gateway. Begin reading at `tracer`.
"""
