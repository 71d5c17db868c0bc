"""Storage for KV outside an engine's own cache, with the policies that decide what stays when it is full.

eviction      LRU, ARC, learned: pure, over keys
twice         an estimate of what twice the memory would find: pure, over keys
retaining     priorities, TTLs and quotas around any eviction policy: pure
sessions      which chunks only one session has used: pure
slot_index    assignment of keys to slots, and the uses of each slot: pure
host_rows     the slots' memory, and the copies between it and an engine's cache
chunk         one rank's KV of one chunk, which names itself and proves its integrity
store         interface of what keeps chunks; file_store, object_store, redis_store implement it
tiers         several stores, the fastest first, as one
transfers     asynchronous jobs of chunks over stores, on threads; transfer_states has their rules: pure
sweep         keeps a store within its limits of size and age, and knows its size at the start
dates         stored dates that are ahead of the clock count as now
pace          a cap of bandwidth: pure
"""
