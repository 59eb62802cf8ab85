"""Selects the requests of this gateway that are traced, and writes their traces.

May import no other room of the gateway. Begin reading at `tracer`.
"""
