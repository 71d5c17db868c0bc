"""Storage for KV outside an engine's own cache, with the policies that decide what stays when it is full.

eviction      LRU, ARC, S3-FIFO: pure, over keys
slot_index    assignment of keys to slots, and the uses of each slot: pure
host_rows     the slots' memory, and the copies between it and an engine's cache
"""
