"""Limits of every number and name in a peer's layout, and the messages of the errors."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from baton.core.errors import PeerError
from baton.core.kv_groups import MAX_GROUPS
from baton.core.layout import (
    KEYS_AND_VALUES,
    LATENT,
    PLANES,
    CacheSpec,
    LayerLayout,
    RankLayout,
    Region,
    StateLayout,
    UnitsLayout,
)
from baton.protocol.layout_checks import check_layout

REGION = Region(4096, 16)
LAYER: dict[str, Any] = dict(region=0, offset=0, block_stride=1, head_stride=1, head_bytes=1)
SPEC: dict[str, Any] = dict(kind=KEYS_AND_VALUES, dtype="float32", num_heads=1)
PART: dict[str, Any] = dict(name="ssm", offset=0, num_units=1, unit_bytes=1, dtype="float32")

Make: TypeAlias = Callable[[Any], RankLayout]


def layers(*added: LayerLayout, **changes: Any) -> RankLayout:
    """One layer with one block of one token, and `added`."""
    layer = LayerLayout("a", CacheSpec(**SPEC), **LAYER)
    return RankLayout(
        **dict(tp_rank=0, tp_size=1, num_blocks=1, block_tokens=1, regions=(REGION,), layers=(layer, *added))
        | changes
    )


def layer(name: str = "a", /, spec: dict[str, Any] | None = None, **changes: Any) -> LayerLayout:
    return LayerLayout(name, CacheSpec(**SPEC | (spec or {})), **LAYER | changes)


def with_layer(layer: LayerLayout, **changes: Any) -> RankLayout:
    return layers(layers=(layer,), **changes)


def state(*parts: dict[str, Any], name: str = "a", **changes: Any) -> StateLayout:
    units = tuple(UnitsLayout(**PART | part) for part in parts or ({},))
    return StateLayout(**dict(name=name, region=0, offset=0, block_stride=1, group=0, parts=units) | changes)


def with_state(state: StateLayout, **changes: Any) -> RankLayout:
    return layers(layers=(), states=(state,), **changes)


# Least and largest value, by the name of the value in the error.
LIMITS: dict[str, tuple[int, int, Make]] = {
    "pp_size": (1, 4096, lambda n: layers(pp_size=n)),
    "pp_rank": (0, 2, lambda n: layers(pp_size=3, pp_rank=n)),
    "tp_size": (1, 4096, lambda n: layers(tp_size=n)),
    "tp_rank": (0, 2, lambda n: layers(tp_size=3, tp_rank=n)),
    "num_blocks": (1, 2**32, lambda n: layers(num_blocks=n, regions=(Region(0, 2**32),))),
    "block_tokens": (
        1,
        1 << 16,
        lambda n: with_layer(
            layer(block_stride=n, head_bytes=n), block_tokens=n, regions=(Region(0, 1 << 17),)
        ),
    ),
    "number of regions": (1, 4096, lambda n: layers(regions=(REGION,) * n)),
    "number of layers": (1, 4096, lambda n: layers(layers=tuple(layer(f"{i}") for i in range(n)))),
    "region address": (0, 2**64 - 1, lambda n: layers(regions=(REGION, Region(n, 1)))),
    "region nbytes": (1, 2**64 - 4096, lambda n: layers(regions=(REGION, Region(4096, n)))),
    "length of the draft's digest": (0, 256, lambda n: layers(draft="d" * n)),
    "length of a layer's name": (1, 256, lambda n: with_layer(layer("a" * n))),
    "layer 'a': length of the kind's name": (1, 256, lambda n: with_layer(layer(spec={"kind": "k" * n}))),
    "layer 'a': length of the packing's name": (
        1,
        256,
        lambda n: with_layer(layer(spec={"packing": "p" * n})),
    ),
    "layer 'a': length of the dtype's name": (1, 256, lambda n: with_layer(layer(spec={"dtype": "d" * n}))),
    "layer 'a': num_heads": (
        1,
        4096,
        lambda n: with_layer(layer(spec={"num_heads": n}, block_stride=4096), regions=(Region(0, 4096),)),
    ),
    "layer 'a': group": (0, MAX_GROUPS - 1, lambda n: with_layer(layer(group=n))),
    "layer 'a': region": (0, 1, lambda n: with_layer(layer(region=n), regions=(REGION, REGION))),
    "layer 'a': offset": (0, 15, lambda n: with_layer(layer(offset=n))),
    "layer 'a': head_bytes": (
        1,
        16,
        lambda n: with_layer(layer(head_bytes=n, head_stride=n, block_stride=16)),
    ),
    "layer 'a': token_stride": (
        2,
        2**64,
        lambda n: with_layer(layer(head_bytes=2, head_stride=2, block_stride=2, token_stride=n)),
    ),
    "layer 'a': head_stride": (
        2,
        2**64,
        lambda n: with_layer(layer(head_bytes=2, head_stride=n, block_stride=2)),
    ),
    "layer 'a': block_stride": (
        2,
        2**64,
        lambda n: with_layer(layer(head_bytes=2, head_stride=2, block_stride=n)),
    ),
    "state of layer 'a': length of the name": (1, 256, lambda n: with_state(state(name="a" * n))),
    "state of layer 'a': group": (0, MAX_GROUPS - 1, lambda n: with_state(state(group=n))),
    "state of layer 'a': region": (0, 1, lambda n: with_state(state(region=n), regions=(REGION, REGION))),
    "state of layer 'a': offset": (0, 15, lambda n: with_state(state(offset=n))),
    "state of layer 'a': number of parts": (
        1,
        64,
        lambda n: with_state(
            state(*({"name": f"{i}", "offset": i} for i in range(n)), block_stride=64)
            if n
            else state(parts=()),
            regions=(Region(0, 64),),
        ),
    ),
    "state of layer 'a': length of a part's name": (1, 256, lambda n: with_state(state({"name": "p" * n}))),
    "state of layer 'a': length of a part's dtype": (1, 256, lambda n: with_state(state({"dtype": "d" * n}))),
    "state of layer 'a': num_units of ssm": (
        1,
        1 << 16,
        lambda n: with_state(state({"num_units": n}, block_stride=1 << 16), regions=(Region(0, 1 << 16),)),
    ),
    "state of layer 'a': unit_bytes of ssm": (
        1,
        16,
        lambda n: with_state(state({"unit_bytes": n}, block_stride=16)),
    ),
    "state of layer 'a': offset of b": (
        2,
        16,
        lambda n: with_state(
            state({"unit_bytes": 2}, {"name": "b", "offset": n, "unit_bytes": 1}, block_stride=16)
        ),
    ),
    "state of layer 'a': block_stride": (
        2,
        2**64,
        lambda n: with_state(state({"unit_bytes": 2}, block_stride=n)),
    ),
}


def error_of(layout: RankLayout) -> str:
    try:
        check_layout(layout)
    except PeerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", LIMITS)
def test_a_number_outside_its_limits_is_named(what: str) -> None:
    low, high, make = LIMITS[what]
    for value in (low - 1, high + 1):
        named = what.replace("'a'", repr("a" * value)) if what.endswith("the name") else what
        if value >= 0 or "length" not in what:
            assert error_of(make(value)) == f"layout: {named} is {value}, expected {low} to {high}"


@pytest.mark.parametrize("what", LIMITS)
def test_the_limits_themselves_are_allowed(what: str) -> None:
    low, high, make = LIMITS[what]
    assert f"layout: {what} is" not in error_of(make(low))
    other_error = {  # The value is allowed, and another check refuses the layout.
        "state of layer 'a': offset of b": "layout: state of layer 'a': block_stride is 16, expected 17 to",
        "layer 'a': length of the kind's name": "layout: layer 'a': kind is 'kkk",
    }
    error = error_of(make(high))
    assert error.startswith(other_error[what]) if what in other_error else error == ""


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        (layers(layer()), "two layers have the same name"),
        (layers(states=(state(),)), "two layers have the same name"),
        (
            with_layer(layer(is_draft=True)),
            "layer 'a': is of a draft model, and the layout names none",
        ),
        (
            with_layer(layer(head_bytes=3, head_stride=3, block_stride=3), block_tokens=2),
            "layer 'a': head_bytes 3 is not a multiple of block_tokens (2)",
        ),
        (
            with_layer(layer(spec={"packing": PLANES}, token_stride=2)),
            "layer 'a': packing 'planes' does not allow a token_stride above 1",
        ),
        (
            with_layer(layer(block_stride=8), num_blocks=3),
            "layer 'a': its last block ends at 17, its region at 16",
        ),
        (
            with_layer(layer(offset=9, block_stride=7), num_blocks=2),
            "layer 'a': its last block ends at 17, its region at 16",
        ),
        (
            with_layer(layer(spec={"kind": "k" * 256})),
            f"layer 'a': kind is {'k' * 256!r}; known: keys_and_values, latent, index_keys, scales",
        ),
        (
            with_layer(layer(spec={"scales": "s" * 300})),
            f"layer 'a': scales is {'s' * 256!r}; known: none, constant, inline, beside",
        ),
        (
            with_layer(layer(spec={"kind": LATENT, "num_heads": 2})),
            "layer 'a': num_heads is 2, expected 1 to 1",
        ),
        (
            with_layer(layer(spec={"num_heads": 3}), tp_size=2),
            "layer 'a': 2 ranks cannot share 3 KV heads evenly",
        ),
        # All tokens of a head before those of the next head, or all heads of a token before the next token.
        (
            with_layer(
                layer(spec={"num_heads": 2}, head_bytes=3, head_stride=2, block_stride=16), block_tokens=3
            ),
            "layer 'a': head_stride is 2, expected 3 to 18446744073709551616",
        ),
        (
            with_layer(
                layer(spec={"num_heads": 3}, head_bytes=2, head_stride=1, token_stride=2, block_stride=16),
                block_tokens=2,
            ),
            "layer 'a': token_stride is 2, expected 3 to 18446744073709551616",
        ),
        (with_state(state(kind="k")), "state of layer 'a': kind is 'k'; known: state"),
        (with_state(state({}, {})), "state of layer 'a': two parts have the same name"),
        (
            with_state(state({"num_units": 3}), tp_size=2),
            "state of layer 'a': 2 ranks cannot share 3 units of ssm evenly",
        ),
        (
            with_state(state(block_stride=8, offset=1), num_blocks=3),
            "state of layer 'a': its last block ends at 18, its region at 16",
        ),
        (
            layers(states=(state(name="b"),), num_blocks=2, regions=(REGION,), block_tokens=1 << 17),
            "block_tokens is 131072, expected 1 to 65536",
        ),
        (
            with_state(state(), block_tokens=(1 << 24) + 1),
            "block_tokens is 16777217, expected 1 to 16777216",
        ),
    ],
)
def test_an_unsound_layout_is_refused_with_its_values(layout: RankLayout, error: str) -> None:
    assert error_of(layout) == f"layout: {error}"


@pytest.mark.parametrize(
    "layout",
    [
        with_layer(layer(spec={"num_heads": 2}, head_bytes=2, head_stride=2, block_stride=4), block_tokens=2),
        with_layer(
            layer(spec={"num_heads": 2}, head_bytes=2, head_stride=1, token_stride=2, block_stride=4),
            block_tokens=2,
        ),
        with_layer(layer(offset=9, block_stride=6), num_blocks=2),
        with_layer(layer(spec={"num_heads": 16}, block_stride=16)),
        # The stride between heads has no meaning for one head, nor that between tokens for one token.
        with_layer(layer(head_bytes=3, head_stride=1, block_stride=3), block_tokens=3),
        with_layer(layer(spec={"num_heads": 3}, head_stride=1, token_stride=2, block_stride=3)),
        with_layer(layer(is_draft=True), draft="digest"),
        with_state(state({"num_units": 16}, block_stride=16)),
        with_state(state(block_stride=6, offset=4), num_blocks=2),
        with_state(state(), block_tokens=1 << 24),
    ],
)
def test_a_layout_may_fill_its_region_and_leave_no_gaps(layout: RankLayout) -> None:
    assert error_of(layout) == ""
