"""Decode steps recorded once per batch size and replayed, which saves the cost of launching single kernels.

    bucket 8    | a b c d e . . . |    five requests decode one token each; the padding writes to the scratch
                                       block, which no request owns

    record      before the first step, largest bucket first; padding only, so no block of the pool is touched
    replay      fill the bucket's static inputs, refill its attention plan, replay, take the first five rows

    full        the whole forward is one graph. The connector's layer hooks are Python, which a graph does not
    record:
                full graphs are for hooks that do nothing in a decode step, and for hooks that the connector
                declares capturable (`graph_capturable`)
    piecewise   the parts between two attention layers are graphs; attention and the hooks around it are not

A step that computes prompt tokens, or has synchronous loads, is not replayed. `mode` chooses the mode,
`recorders` record graphs on a device.
"""

from baton.engine.graphs.decode_graphs import DecodeGraphs, GraphMode, bucket_sizes, choose_mode

__all__ = ["DecodeGraphs", "GraphMode", "bucket_sizes", "choose_mode"]
