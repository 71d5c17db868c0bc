"""Engines: their state, health and load, their choice, the queue in front of them, copies of all this."""
