"""Stub of the parts of vLLM that Baton's connector imports: names and signatures without behaviour."""

__version__ = "0.32.0"
