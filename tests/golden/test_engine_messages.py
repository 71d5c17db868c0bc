"""Messages between the processes of one engine, as msgpack: tags, fields, and the bytes of one sample.

Both ends are of one installation, so a change on purpose needs no version.
"""

import msgspec

from baton.engine.api import (
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    PromptLogprobs,
    RequestError,
    SamplingParams,
    SchedulerStats,
    TokenLogprob,
    TokenLogprobs,
)
from baton.engine.core.core_messages import (
    Abort,
    AddRequest,
    Drain,
    Drained,
    FromCore,
    Outputs,
    Ping,
    Pong,
    Restarted,
    Restarting,
    Start,
    Started,
    StartFailed,
    Stop,
    Stopped,
    TakeBack,
    ToCore,
)
from baton.http.workers import Answer
from tests.golden.golden import check
from tests.golden.samples import ENGINE_CONFIG
from tests.golden.shapes import shape

LIKELIEST = TokenLogprob(token_id=7, logprob=-0.25, rank=1)
OUTPUT = EngineOutput(
    request_id="r",
    new_token_ids=[7],
    new_logprobs=[TokenLogprobs(chosen=LIKELIEST, top=(LIKELIEST,))],
    prompt_logprobs=PromptLogprobs(1, b"ids", b"logprobs", b"ranks"),
    finish_reason="stop",
    stop_token_id=2,
    error=RequestError("message", is_users=True, field="field", load_failure="aborted"),
    kv_transfer_params={"baton_ticket": "ticket"},
    num_cached_tokens=16,
    num_transferred_tokens=8,
)
REQUEST = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2],
    sampling_params=SamplingParams(logit_bias={3: 0.5}, stop_token_ids=(2,)),
    arrival_time_s=1.5,
    priority=-1,
    cache_salt="salt",
    kv_transfer_params={"do_remote_decode": True},
)
MESSAGES = (
    Start(ENGINE_CONFIG, "baton.assemble:connector_factory"),
    AddRequest(REQUEST),
    Abort("r"),
    TakeBack({"baton_ticket": "ticket"}),
    Ping(),
    Drain(30.0),
    Stop(),
    Started("introduction"),
    StartFailed("message", True),
    Restarting("reason"),
    Restarted("introduction"),
    Outputs(EngineOutputs(outputs=[OUTPUT], stats=SchedulerStats(kv_connector_stats={"num_loans": 1}))),
    Pong(),
    Drained(True),
    Stopped("reason"),
)


def test_fields() -> None:
    kinds = {"to the engine core": ToCore, "from the engine core": FromCore, "from an HTTP worker": Answer}
    check("engine_fields", [line for name, kind in kinds.items() for line in (f"# {name}", *shape(kind))])


def test_bytes() -> None:
    assert {type(message) for message in MESSAGES} == {*ToCore.__args__, *FromCore.__args__}
    lines = [
        f"{message.__struct_config__.tag}: {msgspec.msgpack.encode(message).hex()}" for message in MESSAGES
    ]
    check("engine_bytes", [*lines, f"HTTP worker: {msgspec.msgpack.encode(Answer('user', 'm', 'f')).hex()}"])
