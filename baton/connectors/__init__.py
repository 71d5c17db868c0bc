"""Connectors: their halves drive protocol machines and execute the effects as transport or tier calls."""
