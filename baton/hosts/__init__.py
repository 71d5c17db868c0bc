"""The hosts of the connectors besides the embedded engine."""
