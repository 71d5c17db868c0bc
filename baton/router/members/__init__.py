"""Sources of members and other routers, and probes of engines."""
