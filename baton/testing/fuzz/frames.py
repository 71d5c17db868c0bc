"""Generates malformed and malicious frames from one seed.

    bytes      random bytes
    tree       msgpack of any shape
    damaged    a well-formed frame that was cut, spliced, or had bits flipped
    envelope   a well-formed envelope of well-formed messages with any sender and target; names, numbers and
               hashes are often real ones

Envelopes are made from the message types (`msgspec.inspect`), so a new message is fuzzed without a change
here.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.core.identity import KVIdentity
from baton.core.ids import Address, LoanId
from baton.protocol.messages import U64_MAX, WIRE_VERSION, Message

_pack = msgspec.msgpack.Encoder().encode

_INTEGERS = (0, 1, 2, 3, 255, 2**31, 2**32, 2**53, U64_MAX, -1, -(2**63))
_FLOATS = (0.0, 0.5, 30.0, 1e300, -1.0, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "\x00", "\ud7ff", "é中文🙂", "../../etc/passwd", "%s%n{0}", "x" * 257, "\u202e\ufeff")
_DEPTH_MAX = 4


@dataclass(frozen=True, slots=True)
class Cast:
    """Real names and numbers of the listener under test, for use in envelopes."""

    target: Address
    senders: tuple[Address, ...]  # Honest peers and strangers.
    loan_ids: tuple[LoanId, ...]
    numbers: tuple[int, ...]  # Claims, sequences, token counts.
    texts: tuple[str, ...]  # Transfer ids, tickets.
    hashes: tuple[bytes, ...]
    kv_identity: KVIdentity


class FrameMaker:
    def __init__(self, draw: random.Random, cast: Cast) -> None:
        self._draw = draw
        self._cast = cast
        message_types = msgspec.inspect.type_info(Message)
        assert isinstance(message_types, msgspec.inspect.UnionType)
        self._message_types: Sequence[msgspec.inspect.Type] = message_types.types
        self._recent: list[bytes] = [_pack([WIRE_VERSION, ["a", 1], list(cast.target), []])]
        self._kinds: dict[str, Callable[[], bytes]] = {
            "bytes": self._bytes,
            "tree": lambda: _pack(self._tree(0)),
            "damaged": self._damaged,
            "envelope": self._envelope,
        }

    def frame(self) -> tuple[str, bytes]:
        """(kind, frame)."""
        (kind,) = self._draw.choices(tuple(self._kinds), weights=(1, 1, 3, 5))
        return kind, self._kinds[kind]()

    # --- Kinds ---------------------------------------------------------------------------------

    def _bytes(self) -> bytes:
        return self._draw.randbytes(self._draw.choice((0, 1, 7, 64, 300)))

    def _tree(self, depth: int) -> Any:
        draw = self._draw
        if depth < _DEPTH_MAX and draw.random() < 0.6:
            size = draw.choice((0, 1, 2, 3, 4, 4, 9))
            if draw.random() < 0.8:
                return [self._tree(depth + 1) for _ in range(size)]
            return {self._scalar_key(): self._tree(depth + 1) for _ in range(size)}
        return self._scalar()

    def _scalar_key(self) -> str | int:
        return self._draw.choice((*_TEXTS, *_INTEGERS))

    def _scalar(self) -> Any:
        draw = self._draw
        pool = draw.choice((_INTEGERS, _FLOATS, _TEXTS, (None, True, False), (b"", draw.randbytes(32))))
        return draw.choice(pool)

    def _damaged(self) -> bytes:
        draw = self._draw
        frame = bytearray(draw.choice(self._recent))
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(len(frame) + 1)
            match draw.randrange(5):
                case 0 if frame:
                    frame[at % len(frame)] ^= 1 << draw.randrange(8)
                case 1:
                    del frame[at:]
                case 2:
                    other = draw.choice(self._recent)
                    frame[at:at] = other[draw.randrange(len(other) + 1) :][:200]
                case 3:
                    # Wrong lengths: array32, map32, str32, bin32, ext32 of four billion.
                    frame[at:at] = bytes((draw.choice((0xDD, 0xDF, 0xDB, 0xC6, 0xC9)), 255, 255, 255, 255))
                case _:
                    del frame[at : at + draw.randrange(1, 9)]
        return bytes(frame)

    def _envelope(self) -> bytes:
        draw, cast = self._draw, self._cast
        version = WIRE_VERSION if draw.random() < 0.97 else draw.choice(_INTEGERS)
        target = cast.target if draw.random() < 0.9 else draw.choice(cast.senders)
        sender = draw.choice(cast.senders)
        messages = [
            self._value(draw.choice(self._message_types)) for _ in range(draw.choice((0, 1, 1, 1, 2, 5)))
        ]
        frame = _pack([version, list(sender), list(target), messages])
        if len(self._recent) < 256:
            self._recent.append(frame)
        else:
            self._recent[draw.randrange(256)] = frame
        return frame

    # --- Values of a type ------------------------------------------------------------------------

    def _value(self, kind: msgspec.inspect.Type) -> Any:
        """Return a value as on the wire; one in a hundred has another type."""
        draw, cast = self._draw, self._cast
        if draw.random() < 0.01:
            return self._tree(_DEPTH_MAX - 1)
        match kind:
            case msgspec.inspect.StructType(cls=cls) if cls is KVIdentity and draw.random() < 0.8:
                return msgspec.to_builtins(cast.kv_identity)
            case msgspec.inspect.StructType(fields=fields, array_like=True, tag=tag):
                values = [self._value(field.type) for field in fields]
                return [tag, *values] if tag is not None else values
            case msgspec.inspect.StructType(fields=fields):
                return {field.encode_name: self._value(field.type) for field in fields}
            case msgspec.inspect.NamedTupleType(cls=cls) if cls is Address and draw.random() < 0.9:
                return list(draw.choice((cast.target, *cast.senders)))
            case msgspec.inspect.NamedTupleType(cls=cls) if cls is LoanId and draw.random() < 0.9:
                return list(draw.choice(cast.loan_ids))
            case msgspec.inspect.NamedTupleType(fields=fields):
                return [self._value(field.type) for field in fields]
            case msgspec.inspect.VarTupleType(item_type=item_type):
                return [self._value(item_type) for _ in range(draw.choice((0, 1, 2, 40)))]
            case msgspec.inspect.IntType():
                return draw.choice((*cast.numbers, *cast.numbers, *_INTEGERS))
            case msgspec.inspect.FloatType():
                return draw.choice(_FLOATS)
            case msgspec.inspect.StrType():
                if draw.random() < 0.2:
                    return f"transfer-{draw.getrandbits(64)}"  # An id that no peer has ever used.
                return draw.choice((*cast.texts, *cast.texts, *_TEXTS))
            case msgspec.inspect.BytesType():
                return draw.choice((*cast.hashes, b"", draw.randbytes(32)))
            case _:
                return self._scalar()
