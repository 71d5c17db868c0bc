"""Hashes, timers, topology, configuration: pure values and the inequalities between them."""

import hmac

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config import ClusterSecret, KVEventsConfig, KVTransferConfig
from baton.core.errors import ConfigError
from baton.core.hashing import block_hash, block_hashes, extra_key, prompt_hash, root_hash
from baton.core.identity import KVIdentity, differences
from baton.core.layout import declared_loss, kv_heads_of
from baton.core.timers import Timers

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=12)
salts = st.none() | st.text(max_size=3)


@given(tokens, tokens, st.data())
def test_equal_prompt_hashes_mean_equal_prefixes(a: list[int], b: list[int], draw: st.DataObject) -> None:
    n = draw.draw(st.integers(0, min(len(a), len(b))))
    assert (prompt_hash(a, n) == prompt_hash(b, n)) == (a[:n] == b[:n])


@given(tokens, st.data())
def test_a_longer_prefix_is_another_prompt(a: list[int], draw: st.DataObject) -> None:
    m, n = draw.draw(st.integers(0, len(a))), draw.draw(st.integers(0, len(a)))
    assert (prompt_hash(a, m) == prompt_hash(a, n)) == (m == n)


@given(
    st.tuples(salts, salts, st.lists(st.text(max_size=2), max_size=2)),
    st.tuples(salts, salts, st.lists(st.text(max_size=2), max_size=2)),
)
def test_the_extra_key_is_unambiguous(
    a: tuple[str | None, str | None, list[str]], b: tuple[str | None, str | None, list[str]]
) -> None:
    def key(x: tuple[str | None, str | None, list[str]]) -> bytes:
        return extra_key(cache_salt=x[0], adapter=x[1], media=x[2])

    assert (key(a) == key(b)) == (a == b)


def test_a_block_hash_depends_on_its_parent_its_tokens_and_the_extra() -> None:
    root = root_hash()
    one = block_hash(root, [1, 2])
    assert (
        len({one, block_hash(one, [1, 2]), block_hash(root, [2, 1]), block_hash(root, [1, 2], b"salt")}) == 4
    )
    assert root_hash("other") != root


def test_the_hashes_of_several_blocks_are_those_of_each_block_without_the_rest() -> None:
    first = block_hash(root_hash(), range(4), b"salt")
    second = block_hash(first, range(4, 8), b"salt")
    assert block_hashes(root_hash(), range(11), 4, b"salt") == [first, second]
    assert block_hashes(first, range(3), 4) == []


@given(st.integers(0, 5).map(lambda k: 2**k), st.integers(0, 6).map(lambda k: 2**k))
def test_every_head_has_an_owner_and_ranks_hold_equal_shares(tp_size: int, num_kv_heads: int) -> None:
    held = [kv_heads_of(rank, tp_size=tp_size, num_kv_heads=num_kv_heads) for rank in range(tp_size)]
    assert {len(heads) for heads in held} == {max(1, num_kv_heads // tp_size)}
    assert {head for heads in held for head in heads} == set(range(num_kv_heads))
    assert [heads.start for heads in held] == sorted(heads.start for heads in held)


def test_the_default_timers_survive_two_lost_renewals() -> None:
    timers = Timers()
    third_send = 2 * timers.renew_every_s + timers.renew_every_s
    assert third_send + timers.round_trip_max_s < timers.believed_ttl_s


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"renewals_per_ttl": 2}, "renewals_per_ttl"),
        ({"ttl_s": 1.0}, "ttl_s"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"loan_max_s": 150.0}, "loan_max_s"),
        ({"drift_max": 1.0}, "drift_max"),
        ({"silence_s": 4.0}, "silence_s"),
        ({"hold_s": 6.0}, "hold_s"),
        ({"grant_every_s": 0.0}, "grant_every_s"),
    ],
)
def test_timers_that_contradict_each_other_are_refused(change: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"timers\.{field}"):
        Timers(**change)  # type: ignore[arg-type]


def test_a_kv_transfer_config_reads_vllms_json() -> None:
    config = KVTransferConfig.from_json(
        '{"kv_connector": "BatonPullConnector", "kv_role": "kv_both", "engine_id": "e",'
        ' "kv_connector_extra_config": {"host": "127.0.0.1"}}'
    )
    assert config.is_kv_producer
    assert config.is_kv_consumer
    assert config.get_from_extra_config("host", None) == "127.0.0.1"
    assert config.kv_load_failure_policy == "recompute"


@pytest.mark.parametrize(
    "text",
    [
        '{"kv_connector": "X"}',
        '{"kv_connector": "X", "kv_role": "kv_reader"}',
        '{"kv_connector": "X", "kv_role": "kv_both", "engine_id": ""}',
        '{"kv_connector": "X", "kv_role": "kv_both", "typo": 1}',
        '{"kv_connector": "X", "kv_role": "kv_both", "kv_connector_module_path": ""}',
        "{",
    ],
)
def test_a_wrong_kv_transfer_config_names_the_field(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        KVTransferConfig.from_json(text)


def test_a_wrong_choice_in_a_configuration_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"^kv_transfer_config\.kv_role: .*; one of kv_both, kv_consumer"):
        KVTransferConfig.from_json('{"kv_connector": "X", "kv_role": "kv_reader"}')
    with pytest.raises(ConfigError, match=r"^kv_events_config\.publisher: .*; one of null, zmq$"):
        KVEventsConfig.from_json('{"publisher": "kafka"}')


def test_a_convertible_dtype_differs_only_without_conversion() -> None:
    ours = KVIdentity("m", "r", "float32", 2, 2, 64, "s")
    theirs = msgspec.structs.replace(ours, dtype="bfloat16")
    assert differences(ours, theirs) == []
    assert differences(ours, theirs, converts_dtype=False) == ["dtype: ours 'float32', theirs 'bfloat16'"]


def test_a_conversion_declares_what_it_loses() -> None:
    assert declared_loss("bfloat16", "float32") == ""
    assert declared_loss("float16", "float32") == ""
    assert declared_loss("float8_e4m3fn", "bfloat16") == ""
    assert declared_loss("float32", "bfloat16") == (
        "float32 -> bfloat16: lossy (23 bits of mantissa become 7)"
    )
    assert declared_loss("bfloat16", "float16") == (
        "bfloat16 -> float16: lossy (values beyond 65504 saturate, small ones become 0)"
    )


def test_the_secret_is_not_printed_and_not_short() -> None:
    secret = ClusterSecret(b"0123456789abcdef")
    assert "0123" not in f"{secret} {secret!r}"
    assert secret.derive("a") != secret.derive("b")
    with pytest.raises(ConfigError):
        ClusterSecret(b"short")


def test_a_previous_secret_is_accepted_and_never_signs() -> None:
    old, new = b"the old secret of the cluster", b"the new secret of the cluster"
    both = ClusterSecret(new, old)
    assert both.derive("a") == ClusterSecret(new).derive("a")
    assert both.derive_all("a") == (ClusterSecret(new).derive("a"), ClusterSecret(old).derive("a"))
    assert len(ClusterSecret(new).derive_all("a")) == 1
    assert "old" not in f"{both} {both!r}"
    with pytest.raises(ConfigError):
        ClusterSecret(new, b"short")


def test_a_guess_of_the_secret_costs_more_than_one_hash() -> None:
    """A weak secret must not be found by hashing a dictionary and comparing the signatures."""
    key = b"a weak secret of sixteen bytes"
    assert ClusterSecret(key).derive("a") != hmac.digest(key, b"a", "sha256")
