"""Whole engines: the real scheduler, both halves of the real connector and the real router policies.

cluster  hosts and restarts         engine    one incarnation
wire     signs control frames       port      the transport of a rank
scenario what a world begins with, and its probes
clients  conversations              router    clients' requests
processes of the router, and their notes

`baton.testing.host` has what computes: ranks, their memory and their model.
"""
