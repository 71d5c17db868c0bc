"""The doors of an administrator: API keys, control, metrics, the page."""
