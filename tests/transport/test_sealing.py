"""Messages over scattered memory: only a message that was sealed can be opened."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from baton.transport.base import gather, stream
from baton.transport.tcp.sealing import KEY_BYTES, LEVELS, NO_TAG, Direction, Integrity, stronger
from tests.transport.copy_library import built

KEY = bytes(range(KEY_BYTES))
MEMORY_BYTES = 1 << 16
levels = st.sampled_from(["mac", "encrypt"])


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "LIBRARY", built())
        yield


def ghash_levels() -> range:
    """Sets of instructions that this CPU has, and 0 for `cryptography`."""
    library = stream.compiled()
    return range(1 + (library.ghash_level if library is not None else 0))


@st.composite
def pieces_of_memory(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(start, length) of segments that do not overlap, in any order; often all of one length."""
    one_length = draw(st.none() | st.sampled_from([1, 64, 500, 9000]))
    pieces, at = [], draw(st.integers(0, 100))
    for _ in range(draw(st.integers(1, 6))):
        length = one_length or draw(st.integers(1, 10_000))
        if at + length > MEMORY_BYTES:
            break
        pieces.append((at, length))
        at += length + draw(st.integers(0, 300))
    return draw(st.permutations(pieces))


def arrays(memory: np.ndarray, pieces: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    starts, lengths = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
    return memory.ctypes.data + starts, lengths


@given(
    pieces=pieces_of_memory(), integrity=levels, flip=st.none() | st.integers(0, 10**9), choice=st.integers(0)
)
def test_a_message_is_the_concatenation_of_its_segments(
    pieces: list[tuple[int, int]], integrity: Integrity, flip: int | None, choice: int
) -> None:
    levels = ghash_levels()
    sender, reader = (levels[number % len(levels)] for number in divmod(choice, len(levels)))
    source = np.random.default_rng(9).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    joined = b"".join(source[start : start + length].tobytes() for start, length in pieces)
    ciphertext = bytearray(MEMORY_BYTES)
    sealing = Direction(KEY, integrity, ghash_level=sender).seal(7, b"header")
    sealing.add(*arrays(source, pieces), memoryview(ciphertext))
    tag, nonce = sealing.tag(), (7).to_bytes(12, "little")
    if integrity == "mac":
        assert AESGCM(KEY).encrypt(nonce, b"", b"header" + joined) == tag
        target, on_the_wire = source.copy(), source.copy()
    else:
        assert AESGCM(KEY).encrypt(nonce, joined, b"header") == bytes(ciphertext[: len(joined)]) + tag
        target, on_the_wire = np.zeros_like(source), np.frombuffer(ciphertext, dtype=np.uint8)
    if flip is not None:
        if integrity == "mac":
            start, length = pieces[flip % len(pieces)]
            target[start + flip % length] ^= 4
        else:
            on_the_wire[flip % len(joined)] ^= 4
    opening = Direction(KEY, integrity, ghash_level=reader).open(7, b"header")
    opening.add(*arrays(target, pieces), memoryview(on_the_wire))
    assert opening.is_genuine(tag) is (flip is None)
    if flip is None:
        expected = source if integrity == "mac" else np.zeros_like(source)
        for start, length in pieces:
            expected[start : start + length] = source[start : start + length]
        assert np.array_equal(target, expected), "bytes outside the segments were written"


def test_gmac_is_nists() -> None:
    """gcmEncryptExtIV128.rsp of NIST's CAVP: no plaintext, 128 bits of additional data, Count = 0."""
    key = bytes.fromhex("77be63708971c4e240d1cb79e8d77feb")
    nonce = int.from_bytes(bytes.fromhex("e0e00f19fed7ba0136a797f3"), "little")
    data = bytes.fromhex("7a43ec1d9c0a5a78a0b16533a6213cab")
    for level in ghash_levels():
        tag = Direction(key, "mac", ghash_level=level).seal(nonce, data).tag()
        assert tag.hex() == "209fcc8d3675ed938e9c7166709dd946"


@pytest.mark.parametrize(
    ("key", "number", "header"),
    [(KEY[::-1], 1, b"header"), (KEY, 2, b"header"), (KEY, 1, b"Header")],
    ids=["another connection or direction", "another place", "another request"],
)
def test_a_tag_is_good_for_one_message(key: bytes, number: int, header: bytes) -> None:
    tag = Direction(KEY, "mac").seal(1, b"header").tag()
    assert Direction(KEY, "mac").open(1, b"header").is_genuine(tag)
    assert not Direction(key, "mac").open(number, header).is_genuine(tag)


@pytest.mark.parametrize("number", [5, 4, 0])
def test_a_nonce_is_never_used_twice(number: int) -> None:
    direction = Direction(KEY, "mac")
    direction.seal(5, b"")
    with pytest.raises(AssertionError, match="used once"):
        direction.seal(number, b"")


def test_off_computes_nothing() -> None:
    direction = Direction(KEY, "off")
    nowhere = np.array([0]), np.array([1 << 40])  # A read of it would crash.
    sealing, opening = direction.seal(1, b""), direction.open(1, b"")
    sealing.add(*nowhere, memoryview(b""))
    opening.add(*nowhere, memoryview(b""))
    assert sealing.tag() == NO_TAG
    assert opening.is_genuine(NO_TAG)


def test_the_stronger_of_two_levels_is_used() -> None:
    assert [stronger(a, b) for a in LEVELS for b in LEVELS] == [
        "off", "mac", "encrypt", "mac", "mac", "encrypt", "encrypt", "encrypt", "encrypt",
    ]  # fmt: skip
