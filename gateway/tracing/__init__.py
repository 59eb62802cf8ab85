"""Which requests of this gateway are traced, and where their traces go (section 12 of the interface).

May import no other room of the gateway. Begin reading at `tracer`.
"""
