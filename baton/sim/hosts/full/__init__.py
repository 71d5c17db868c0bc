"""Full worlds: the real scheduler, both halves of the real connector and the real router policies.

faults   drawn from the seed   scenario  break, heal, probe, rest   cluster  hosts and restarts
engine   one incarnation       ranks     what computes              memory   bytes, and who wrote them
wire     control frames        reads     one-sided reads            model    tokens from the KV read
router   clients' requests     clients   conversations              parts    what a mutant replaces
"""
