"""Fast worlds: the real scheduler halves without ranks, tensors and the engine's scheduler.

cluster   hosts and restarts        host     one incarnation: the process, its half and its ranks' stand-in
prefills  P: computes in steps      fetches  D: from kv_transfer_params to blocks in use
ranks     carries out read orders   port     in-memory control port
wire      seals control frames      memory   blocks and their content
router    dispatches requests       scenario what a world begins with, and its probes
"""
