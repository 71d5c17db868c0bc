"""One completion on its way through the router, as state machines without I/O."""
