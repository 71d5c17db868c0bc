"""Full worlds: the real scheduler, both halves of the real connector and the real router policies.

cluster  hosts and restarts         engine    one incarnation
ranks    what computes              memory    bytes, and who wrote them
wire     signs control frames       port      the transport of a rank
model    tokens from the KV read    clients   conversations
router   clients' requests          processes of the router, and their notes
scenario what a world begins with, and its probes
"""
