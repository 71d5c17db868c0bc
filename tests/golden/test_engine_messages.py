"""Messages between the processes of one engine, as msgpack: tags, fields, and the bytes of one sample.

Both ends are of one installation, so a change on purpose needs no version.
"""

import msgspec

from baton.engine import api
from baton.engine.core import core_messages as core
from baton.engine.core.weights_update import UpdateEnd, WeightsUpdate
from baton.http.workers import JobResult
from tests.golden.golden import check
from tests.golden.samples import ENGINE_CONFIG
from tests.golden.shapes import shape

LIKELIEST = api.TokenLogprob(token_id=7, logprob=-0.25, rank=1)
OUTPUT = api.EngineOutput(
    request_id="r",
    new_token_ids=[7],
    new_logprobs=[api.TokenLogprobs(chosen=LIKELIEST, top=(LIKELIEST,))],
    prompt_logprobs=api.PromptLogprobs(1, b"ids", b"logprobs", b"ranks"),
    finish_reason="stop",
    stop_token_id=2,
    error=api.RequestError("message", is_users=True, field="field", load_failure="aborted"),
    kv_transfer_params={"baton_ticket": "ticket"},
    num_cached_tokens=16,
    num_transferred_tokens=8,
)
REQUEST = api.EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2],
    sampling_params=api.SamplingParams(logit_bias={3: 0.5}, stop_token_ids=(2,)),
    arrival_time_s=1.5,
    priority=-1,
    cache_salt="salt",
    kv_transfer_params={"do_remote_decode": True},
)
MESSAGES = (
    core.Start(ENGINE_CONFIG, "baton.assemble:connector_factory"),
    core.AddRequest(REQUEST),
    core.Abort("r"),
    core.TakeBack({"baton_ticket": "ticket"}),
    core.Ping(),
    core.Drain(30.0),
    core.UpdateWeights(WeightsUpdate(ENGINE_CONFIG.model_config, (("a", 1, 2, 3, 4),), "keep", 1.5)),
    core.Stop(),
    core.Started("introduction"),
    core.StartFailed("message", True),
    core.Restarting("reason", [OUTPUT]),
    core.Restarted("introduction"),
    core.Outputs(
        api.EngineOutputs(outputs=[OUTPUT], stats=api.SchedulerStats(kv_connector_stats={"num_loans": 1}))
    ),
    core.Pong(),
    core.Drained(True),
    core.WeightsUpdated(UpdateEnd(api.RequestError("message")), "introduction"),
    core.Stopped("reason"),
)


def test_fields() -> None:
    kinds = {
        "to the engine core": core.ToCore,
        "from the engine core": core.FromCore,
        "from an HTTP worker": JobResult,
    }
    check("engine_fields", [line for name, kind in kinds.items() for line in (f"# {name}", *shape(kind))])


def test_bytes() -> None:
    assert {type(message) for message in MESSAGES} == {*core.ToCore.__args__, *core.FromCore.__args__}
    lines = [
        f"{message.__struct_config__.tag}: {msgspec.msgpack.encode(message).hex()}" for message in MESSAGES
    ]
    check(
        "engine_bytes", [*lines, f"HTTP worker: {msgspec.msgpack.encode(JobResult('user', 'm', 'f')).hex()}"]
    )
