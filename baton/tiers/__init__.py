"""Places for KV outside an engine's own cache, and who stays in them when they are full.

eviction      LRU, ARC, S3-FIFO: pure, over keys
slot_index    which key is in which slot, and who uses it: pure
host_rows     the slots' memory, and the copies between it and an engine's cache
"""
