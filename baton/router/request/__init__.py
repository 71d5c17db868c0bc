"""One request: a state machine without I/O, and what engines and clients say to it."""
