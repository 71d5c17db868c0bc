"""Sockets, timers and HTTP around the router's machines. Nothing else imports asyncio or an HTTP library."""
