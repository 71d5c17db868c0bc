"""Connectors with one deliberate fault each, derived from the correct one; `rule` is the rule that they
break.
"""
