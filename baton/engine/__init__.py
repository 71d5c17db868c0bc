"""Embedded engine: paged KV cache, continuous batching, tensor parallelism. Imports only the contract."""
