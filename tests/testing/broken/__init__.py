"""Connectors with one deliberate fault each, derived from the sound one; `rule` is what they break."""
