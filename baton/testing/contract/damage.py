"""Faults injected into what a connector has stored."""

import random
from pathlib import Path


def cut_files(folder: Path, *, flips_bits: bool = False) -> None:
    """Cut about half of the files in a folder to half their size, and delete the others.

    For `ConnectorCase(break_store=partial(cut_files, folder))`. `flips_bits`: treats a third of the files in
    another way, a changed last byte, for a connector that has checksums. The folder must hold only the
    connector's files.
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
            continue  # The connector has replaced the file.
