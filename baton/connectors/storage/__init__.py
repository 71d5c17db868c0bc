"""KV outside the engine's cache: in host memory, files, buckets and Redis."""
