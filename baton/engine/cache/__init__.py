"""KV cache of one engine: block pool, free queue, prefix cache and block tables. No torch, no clock."""
