"""Full worlds: the real scheduler, both halves of the real connector and the real router policies, one seed.

clockwork  one event queue          faults   drawn from the seed         scenario  break, heal, probe, rest
cluster    machines and engines     engine   one incarnation             router, clients
model      tokens from the KV read  memory   bytes, and who wrote them   ranks     what computes on them
wire       control frames           reads    one-sided reads             checkers  one per invariant
"""
