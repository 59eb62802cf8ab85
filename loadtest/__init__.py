"""Black-box load generation and measurement over the wire; it imports none of the served packages."""
