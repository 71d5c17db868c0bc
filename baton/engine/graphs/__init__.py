"""Decode steps recorded once per batch size and replayed: what launching kernels one by one costs is saved.

    bucket 8    | a b c d e . . . |    five requests decode a token each; the padding writes into the scratch
                                       block, which no request owns

    record      before the first step, largest bucket first; padding only, so no block of the pool is touched
    replay      fill the bucket's static inputs, refill its attention plan, replay, take the first five rows

    full        the whole forward is one graph. The connector's layer hooks are Python, which no graph keeps:
                full graphs are for hooks that do nothing in a decode step, and for those that the connector
                declares capturable (`graph_capturable`)
    piecewise   what lies between two attention layers is a graph; attention and the hooks around it are not

A step that computes any of a prompt, or has synchronous loads, is not replayed. `mode` chooses; `recorders`
know how a graph is recorded on a device.
"""

from baton.engine.graphs.decode_graphs import DecodeGraphs, graphs_of
from baton.engine.graphs.mode import GraphMode, bucket_sizes, choose_mode

__all__ = ["DecodeGraphs", "GraphMode", "bucket_sizes", "choose_mode", "graphs_of"]
