"""The connector contract as one table: a row for each method and property.

by       defined by vLLM or by Baton. A vLLM connector may lack Baton's methods, and vLLM does not call them
half     the half that has it. A connector of both halves forwards it there. CLASS: no half has it, the
         connector's class answers
scope    what a failure costs, see `Scope`
safe     the answer used if a call raises: a value, or the factory of a mutable value
multi    how a Multi connector combines the answers of its children, all of which it calls. LOADER: it calls
         only the child that loads the request. OWN: it has code of its own

Used by all code that forwards calls or contains failures: `halves.TwoHalves`, `guard`, the Multi connector,
the vLLM plug-in and the test kit's watchers. `base` documents each method; a test compares both.
"""

from __future__ import annotations

import enum
from abc import update_abstractmethods
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Final, Literal, TypeVar

from baton.contract.base import KVConnectorBase_V1
from baton.contract.output import KVConnectorTransferResults

Combine = Callable[[Sequence[Any]], Any]
K = TypeVar("K")


class Half(enum.Enum):
    """Each value is the attribute of `halves.HoldsOneHalf` that holds this half."""

    SCHEDULER = "scheduler_half"
    WORKER = "worker_half"
    BOTH = "either_half"
    CLASS = ""


class Scope(enum.Enum):
    START = "raised to the host: it cannot start, or cannot sleep"
    REQUEST = "this request's use of the connector; a UserError is raised and refuses the request"
    ENDED = "this request's use of the connector; it is too late to refuse the request"
    STEP = "the connector's part in this step"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    by: Literal["vllm", "baton"]
    kind: Literal["method", "property"]
    half: Half
    scope: Scope
    safe: Any
    multi: Combine | Literal["loader"] | None

    def safe_answer(self) -> Any:
        return self.safe() if callable(self.safe) else self.safe


def _each(answers: Sequence[Any]) -> None:
    """Combines methods without a result."""


def _first(answers: Sequence[Any]) -> Any:
    return next((answer for answer in answers if answer is not None), None)


_S, _W, _BOTH, _CLASS = Half.SCHEDULER, Half.WORKER, Half.BOTH, Half.CLASS
_START, _REQUEST, _ENDED, _STEP = Scope.START, Scope.REQUEST, Scope.ENDED, Scope.STEP
_M: Final = "method"
_P: Final = "property"
_LOADER: Final = "loader"
_OWN: Final = None
_NO_RESULTS = KVConnectorTransferResults

# fmt: off
ROWS: Final = (
    #   name                                    by       kind half   scope     safe           multi
    Row("role",                                 "vllm",  _P, _CLASS, _START,   None,          _OWN),
    Row("get_required_kvcache_layout",          "vllm",  _M, _CLASS, _START,   None,          _OWN),
    Row("requires_piecewise_for_cudagraph",     "vllm",  _M, _CLASS, _START,   False,         _OWN),
    Row("supports_sleep_mode",                  "vllm",  _M, _CLASS, _START,   False,         _OWN),
    Row("build_kv_connector_stats",             "vllm",  _M, _CLASS, _START,   None,          _OWN),
    Row("build_prom_metrics",                   "vllm",  _M, _CLASS, _START,   None,          _OWN),

    Row("supports_divergent_local_hybrid_hits", "vllm",  _P, _S,     _START,   False,         all),
    Row("requires_kv_delivery",                 "vllm",  _P, _S,     _START,   False,         any),
    Row("bind_kv_cache_manager",                "vllm",  _M, _S,     _START,   None,          _each),
    Row("bind_gpu_block_pool",                  "vllm",  _M, _S,     _START,   None,          _each),
    Row("get_finished_count",                   "vllm",  _M, _S,     _START,   None,          _OWN),
    Row("set_xfer_handshake_metadata",          "vllm",  _M, _S,     _START,   None,          _OWN),
    Row("set_xfer_handshake_metadata_pp_aware", "vllm",  _M, _S,     _START,   None,          _OWN),
    Row("bind_only_rank",                       "baton", _M, _S,     _START,   None,          _OWN),
    Row("on_new_request",                       "vllm",  _M, _S,     _REQUEST, None,          _OWN),
    Row("get_num_new_matched_tokens",           "vllm",  _M, _S,     _REQUEST, (0, False),    _OWN),
    Row("update_state_after_alloc",             "vllm",  _M, _S,     _REQUEST, None,          _OWN),
    Row("take_back",                            "baton", _M, _S,     _REQUEST, None,          _OWN),
    Row("get_loaded_kv_cache_group_ids",        "vllm",  _M, _S,     _ENDED,   (0,),          _LOADER),
    Row("get_external_cache_hit_sources",       "vllm",  _M, _S,     _ENDED,   dict,          _LOADER),
    Row("take_prefilled_tokens",                "baton", _M, _S,     _ENDED,   None,          _LOADER),
    Row("get_load_failure",                     "baton", _M, _S,     _ENDED,   None,          _LOADER),
    Row("register_finished_partial_tail",       "vllm",  _M, _S,     _ENDED,   False,         any),
    Row("request_finished",                     "vllm",  _M, _S,     _ENDED,   (False, None), _OWN),
    Row("request_finished_all_groups",          "vllm",  _M, _S,     _ENDED,   (False, None), _OWN),
    Row("build_connector_meta",                 "vllm",  _M, _S,     _STEP,    None,          _OWN),
    Row("update_connector_output",              "vllm",  _M, _S,     _STEP,    None,          _OWN),
    Row("take_events",                          "vllm",  _M, _S,     _STEP,    (),            _OWN),
    Row("has_pending_block_frees",              "vllm",  _M, _S,     _STEP,    False,         any),
    Row("has_pending_push_work",                "vllm",  _M, _S,     _STEP,    False,         any),
    Row("introduction",                         "baton", _M, _S,     _STEP,    None,          _first),
    Row("drain",                                "baton", _M, _S,     _STEP,    None,          _each),
    Row("reset_cache",                          "vllm",  _M, _S,     _STEP,    False,         _OWN),
    Row("set_weights",                          "baton", _M, _S,     _STEP,    False,         _OWN),

    Row("hidden_states_wanted",                 "baton", _P, _W,     _START,   (),            _OWN),
    Row("graph_capturable",                     "baton", _P, _W,     _START,   False,         all),
    Row("get_mem_pool_context",                 "vllm",  _M, _W,     _START,   None,          _OWN),
    Row("register_kv_caches",                   "vllm",  _M, _W,     _START,   None,          _each),
    Row("register_cross_layers_kv_cache",       "baton", _M, _W,     _START,   None,          _each),
    Row("unregister_kv_caches",                 "vllm",  _M, _W,     _START,   None,          _each),
    Row("restore_kv_caches",                    "vllm",  _M, _W,     _START,   None,          _each),
    Row("set_host_xfer_buffer_ops",             "vllm",  _M, _W,     _START,   None,          _each),
    Row("get_handshake_metadata",               "vllm",  _M, _W,     _START,   None,          _OWN),
    Row("reset_capture_state",                  "vllm",  _M, _W,     _START,   None,          _OWN),
    Row("takes_part",                           "baton", _M, _W,     _STEP,    True,          _OWN),
    Row("handle_preemptions",                   "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("bind_connector_metadata",              "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("has_connector_metadata",               "vllm",  _M, _W,     _STEP,    False,         _OWN),
    Row("_get_connector_metadata",              "vllm",  _M, _W,     _START,   None,          _OWN),
    Row("clear_connector_metadata",             "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("start_load_kv",                        "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("wait_for_layer_load",                  "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("save_kv_layer",                        "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("wait_for_save",                        "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("finish_forward",                       "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("get_finished",                         "vllm",  _M, _W,     _STEP,    (None, None),  _OWN),
    Row("get_transfer_results",                 "vllm",  _M, _W,     _STEP,    _NO_RESULTS,   _OWN),
    Row("get_block_ids_with_load_errors",       "vllm",  _M, _W,     _STEP,    set,           _OWN),
    Row("get_expected_finished_count",          "baton", _M, _W,     _STEP,    0,             _OWN),
    Row("get_kv_connector_kv_cache_events",     "vllm",  _M, _W,     _STEP,    None,          _OWN),
    Row("build_connector_worker_meta",          "vllm",  _M, _W,     _STEP,    None,          _OWN),

    Row("bind_wake",                            "baton", _M, _BOTH,  _START,   False,         all),
    Row("get_kv_connector_stats",               "vllm",  _M, _BOTH,  _STEP,    None,          _OWN),
    Row("shutdown",                             "vllm",  _M, _BOTH,  _START,   None,          _OWN),
)
# fmt: on

SURFACE: Final[Mapping[str, Row]] = {row.name: row for row in ROWS}


def rows_of(half: Half) -> list[Row]:
    return [row for row in ROWS if row.half in (half, Half.BOTH)]


def completed(rows: Iterable[Row], make: Callable[[Row], Callable[..., Any]]) -> Callable[[type[K]], type[K]]:
    """Class decorator that defines a method or property for each of `rows` that the class body leaves out.

    `make` returns the function of a row: of (self, *arguments, **keywords), or of (self) for a property. Its
    signature, name and docstring become those of the contract.
    """

    def complete(kind: type[K]) -> type[K]:
        for row in rows:
            if row.name in vars(kind) or not hasattr(KVConnectorBase_V1, row.name):
                continue  # SupportsHMA's method exists only in classes that derive from it.
            function = make(row)
            if row.kind == "property":
                setattr(kind, row.name, property(function))
                continue
            update_wrapper(function, getattr(KVConnectorBase_V1, row.name), ("__name__", "__doc__"), ())
            function.__qualname__ = f"{kind.__qualname__}.{row.name}"
            setattr(kind, row.name, function)
        return update_abstractmethods(kind)

    return complete
