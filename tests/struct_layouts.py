"""Layouts of C structs: what a compiled library has, and what the mirrors of them in Python have."""

import ctypes


def layouts_in(library: ctypes.CDLL, count: int) -> list[tuple[int, int]]:
    """(size, offset of the last field) of each struct in the library's `baton_structs`."""
    numbers = (ctypes.c_int64 * (2 * count)).in_dll(library, "baton_structs")
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def layout_of(mirror: type[ctypes.Structure]) -> tuple[int, int]:
    return ctypes.sizeof(mirror), getattr(mirror, mirror._fields_[-1][0]).offset
