"""Storage for KV outside an engine's own cache, with the policies that decide what stays when it is full.

policies      LRU, ARC, learned; retention around any of them; sessions; an estimate of twice the memory: pure
host          assignment of keys to slots of host memory, the slots' rows, and the copies to an engine's cache
base          interface of what keeps chunks (`store`), a chunk's name, dates ahead of the clock
backends      files, objects and Redis; several of them as one (`tiers`); limits of size, age and bandwidth
chunks        a chunk that names itself and proves its integrity; jobs of chunks over stores, on threads
"""
