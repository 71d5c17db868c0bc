"""Whole engines: the real scheduler, both halves of the real connector and the real router policies.

cluster  hosts and restarts         engine    one incarnation
wire     control frames, faults     port      the transport of a rank
scenario the course of a world      updates   of the weights
clients  conversations              router    clients' requests
processes of the router, and their notes

`baton.testing.host` has what computes: ranks, their memory and their model.
"""
