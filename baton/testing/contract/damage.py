"""Damage to what a connector has stored, done behind its back."""

from __future__ import annotations

import random
from pathlib import Path


def cut_files(folder: Path, *, flips_bits: bool = False) -> None:
    """The files in a folder that a connector alone keeps KV in: end early, or are gone, a part each.

    `ConnectorCase(break_store=partial(cut_files, folder))`. `flips_bits`: of others the last byte is another,
    for a connector that has checksums.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        try:
            match random.Random(path.name).randrange(3 if flips_bits else 2):
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
                case _:
                    whole = bytearray(path.read_bytes())
                    whole[-1:] = bytes([whole[-1] ^ 0xFF]) if whole else b""
                    path.write_bytes(whole)
        except FileNotFoundError:
            continue  # The connector has put another in its place.
