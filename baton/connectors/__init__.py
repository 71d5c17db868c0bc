"""Connectors: halves that drive protocol machines and turn their effects into transport or tier calls."""
