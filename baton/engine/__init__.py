"""The embedded engine: paged KV cache, continuous batching, tensor parallelism. Knows the contract only."""
