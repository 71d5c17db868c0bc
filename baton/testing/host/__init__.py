"""One engine in memory, without processes and clocks: what simulated worlds and the contract kit drive.

engine   the real scheduler, steps in flight, and answers
workers  worker halves of the ranks, called as the model runner calls them
ranks    what computes               rows    what ranks know of their requests
memory   bytes, and who wrote them   model   tokens from the KV read
"""
