"""As much of vLLM as importing Baton's connector takes: names and shapes, no behaviour."""

__version__ = "0.32.0"
