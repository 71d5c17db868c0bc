"""`baton cache`: shows and manages what the storage connectors keep in a folder, a bucket or Redis.

A STORE is a path, or a URL: s3://bucket/prefix, gs://..., az://..., redis://...
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from baton.stores.backends.sweep import Chunk
    from baton.stores.base.aligned import AlignedMemory
    from baton.stores.base.store import Store

app = typer.Typer(no_args_is_help=True)

GIB = 1 << 30
TIMEOUT_S = 30.0
VALUE_BYTES_MAX = 1 << 30
KEY_DIGITS_MIN = 6

T = TypeVar("T")
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="A path, or a URL: s3://, redis://, ...")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="Of an object store's client, NAME=VALUE; may be repeated."),
]
Namespace = Annotated[str | None, typer.Option(help="Only this one; a prefix is enough.")]
SecretFile = Annotated[
    str | None, typer.Option(help="File with the cluster secret; or set BATON_SECRET.", metavar="FILE")
]


@app.callback()
def _group() -> None:
    """Show and manage the KV in a folder, a bucket or Redis."""


@app.command("ls")
def list_(
    store: StoreArgument,
    option: Options = None,
    namespace: Namespace = None,
    chunks: Annotated[bool, typer.Option("--chunks", help="Each chunk, the last used first.")] = False,
) -> None:
    """List namespaces (a model with its layout and secret), or chunks."""
    from rich.console import Console
    from rich.table import Table

    with _opened(store, option, is_changed=False) as opened:
        found = _found(opened, namespace)
    if not found:
        typer.echo("no chunks")
        return
    now_s = time.time()
    table = Table()
    if chunks:
        for heading in ("namespace", "key", "values", "bytes", "last use", "pinned"):
            table.add_column(heading, overflow="fold")
        for each in sorted(found, key=lambda each: -each.chunk.used_s):
            values = str(each.num_values)
            pinned = "yes" if each.chunk.is_pinned else ""
            age = _ago(each.chunk.used_s, now_s)
            table.add_row(each.namespace, each.key, values, f"{each.chunk.nbytes:,}", age, pinned)
    else:
        for heading in ("namespace", "chunks", "GiB", "last use", "first use", "pinned"):
            table.add_column(heading, overflow="fold")
        of_namespaces: defaultdict[str, list[_Found]] = defaultdict(list)
        for each in found:
            of_namespaces[each.namespace].append(each)
        for name, of_one in sorted(of_namespaces.items()):
            used = [each.chunk.used_s for each in of_one]
            nbytes = sum(each.chunk.nbytes for each in of_one)
            num_pinned = sum(each.chunk.is_pinned for each in of_one)
            ages = _ago(max(used), now_s), _ago(min(used), now_s)
            table.add_row(name, str(len(of_one)), f"{nbytes / GIB:.3f}", *ages, str(num_pinned or ""))
    Console(highlight=False).print(table)


@app.command()
def stat(store: StoreArgument, option: Options = None, namespace: Namespace = None) -> None:
    """Show totals, and what the store promises."""
    with _opened(store, option, is_changed=False) as opened:
        found, promise = _found(opened, namespace), opened.promise
        where = opened.where
    nbytes = sum(each.chunk.nbytes for each in found)
    typer.echo(f"{where}: {len({each.namespace for each in found})} namespaces, {len(found)} chunks")
    num_values = sum(each.num_values for each in found)
    typer.echo(f"{num_values} values, {nbytes / GIB:.3f} GiB")
    typer.echo(f"{sum(each.chunk.is_pinned for each in found)} chunks are pinned")
    for name in promise.__dataclass_fields__:
        typer.echo(f"{name.replace('_', ' ')}: {'yes' if getattr(promise, name) else 'no'}")


@app.command()
def verify(
    store: StoreArgument,
    option: Options = None,
    namespace: Namespace = None,
    secret_file: SecretFile = None,
    insecure_no_secret: Annotated[
        bool, typer.Option("--insecure-no-secret", help="The engines had no secret.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what cannot be used.")] = False,
) -> None:
    """Read every value and verify it. Without a secret: its header and length only. Exit status 1: some
    cannot be used.
    """
    from baton.stores.base.aligned import AlignedMemory
    from baton.stores.base.chunk_name import is_value, namespace_of
    from baton.stores.base.store import Unusable

    keys = _signing_keys(secret_file, is_insecure=insecure_no_secret)
    memory, num_good = AlignedMemory(), 0
    bad: list[str] = []
    unproven: list[str] = []  # Values that seem whole, and that no key proves.
    proven: set[str] = set()  # Namespaces of which a key has proven a value.
    with _opened(store, option, is_changed=remove) as opened:
        names = [name for each in _found(opened, namespace) for name in each.chunk.names if is_value(name)]
        sizes = opened.sizes(names)
        for name, size in _progress("verifying", list(zip(names, sizes, strict=True))):
            if size is None:
                continue  # Evicted meanwhile.
            fault = ""
            try:
                if _is_proven(opened, name, size, memory, keys):
                    num_good += 1
                    proven.add(namespace_of(name))
                else:
                    fault = "corrupt: its checksum is wrong"
                    unproven.append(name)
            except Unusable as error:
                if error.reason not in ("gone", "io"):
                    bad.append(name)
                fault = str(error) if error.reason != "gone" else ""
            if fault:
                typer.echo(f"{name}: {fault}", err=True)
        # All values of a namespace are unproven with another secret, and may be good.
        kept = [name for name in unproven if namespace_of(name) not in proven]
        bad += [name for name in unproven if namespace_of(name) in proven]
        if remove:
            opened.remove(bad)
    checked = "verified" if keys else "checked without a secret: headers and lengths only"
    typer.echo(f"{num_good} of {len(names)} values can be used ({checked})")
    if bad:
        typer.echo(f"{len(bad)} {'were removed' if remove else 'cannot be used; --remove removes them'}")
    if kept:
        typer.echo(
            f"{len(kept)} are in namespaces of which the secret proves no value, and stay: "
            f"{', '.join(sorted({namespace_of(name) for name in kept}))}"
        )
    if bad or kept:
        raise typer.Exit(1)


@app.command()
def pin(
    store: StoreArgument,
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY...", help="Of `ls --chunks`; a prefix is enough.")
    ],
    option: Options = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let sweeps remove them again.")] = False,
) -> None:
    """Keep chunks, whatever the limits of age and size."""
    from baton.stores.base.chunk_name import PIN_SUFFIX, chunk_of

    with _opened(store, option, is_changed=True) as opened:
        chosen = _chosen(_found(opened, None), keys)
        pins = [chunk_of(each.chunk.names[0]) + PIN_SUFFIX for each in chosen]
        if undo:
            opened.remove(pins)
        else:
            for name in pins:
                opened.write(name, (b"pinned\n",))
    typer.echo(f"{len(chosen)} chunks are {'no longer ' if undo else ''}pinned")


@app.command()
def evict(
    store: StoreArgument,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY...]", help="Chunks; a prefix is enough.")
    ] = None,
    option: Options = None,
    namespace: Annotated[str | None, typer.Option(help="All of this one; a prefix is enough.")] = None,
    unused_s: Annotated[float | None, typer.Option(help="What was not used for so long.", min=0)] = None,
    max_gib: Annotated[float | None, typer.Option(help="Down to this size, by last use.", min=0)] = None,
) -> None:
    """Remove chunks: some by key, a namespace that no engine uses any more, or by age and size."""
    from baton.stores.backends.sweep import Limits, sweep

    is_sweep = unused_s is not None or max_gib is not None
    if not (keys or namespace or is_sweep):
        raise typer.BadParameter("name keys, or set --namespace, --unused-s or --max-gib")
    if (keys or namespace) and is_sweep:
        raise typer.BadParameter(
            "--unused-s and --max-gib are for all chunks: name no keys and no --namespace"
        )
    with _opened(store, option, is_changed=True) as opened:
        if is_sweep and opened.promise.evicts_itself:
            raise typer.BadParameter(
                f"{opened.where} evicts by its own policy; name keys, or set --namespace"
            )
        if is_sweep:
            max_bytes = None if max_gib is None else int(max_gib * GIB)
            swept = sweep(opened, Limits(max_bytes, unused_s), now_s=time.time())
            typer.echo(f"removed {swept.num_evicted} chunks, {swept.evicted_bytes / GIB:.3f} GiB")
        else:
            found = _found(opened, namespace)
            chosen = [each for each in (_chosen(found, keys) if keys else found) if not each.chunk.is_pinned]
            for each in _progress("removing", chosen):
                opened.remove(each.chunk.names)
            nbytes = sum(each.chunk.nbytes for each in chosen)
            typer.echo(f"removed {len(chosen)} chunks, {nbytes / GIB:.3f} GiB")


@app.command()
def warm(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A store.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Another store.")],
    option: Options = None,
    namespace: Namespace = None,
    max_gib: Annotated[
        float | None, typer.Option(help="At most so much, the last used first.", min=0)
    ] = None,
) -> None:
    """Copy chunks to another store, for example from a bucket to a local disk. Engines verify loads."""
    from baton.stores.base.aligned import AlignedMemory
    from baton.stores.base.store import Unusable

    memory, num_copied, nbytes = AlignedMemory(), 0, 0
    with ExitStack() as stack:
        opened = stack.enter_context(_opened(source, option, is_changed=False))
        found = sorted(_found(opened, namespace), key=lambda each: -each.chunk.used_s)
        other = stack.enter_context(
            _opened(target, option, is_changed=True)
        )  # All later errors belong to the target.
        for each in _progress("copying", found):
            if max_gib is not None and nbytes + each.chunk.nbytes > max_gib * GIB:
                break
            sizes = zip(each.chunk.names, other.sizes(each.chunk.names), strict=True)
            for name in [name for name, size in sizes if size is None]:
                into = memory.take(max(1, each.chunk.nbytes))
                try:
                    size = opened.read(name, into)
                except Unusable as error:
                    if error.reason != "gone":
                        typer.echo(f"{name}: {error}", err=True)
                    continue
                other.write(name, (into[:size],))
                num_copied, nbytes = num_copied + 1, nbytes + size
    typer.echo(f"copied {num_copied} values, {nbytes / GIB:.3f} GiB")


# --- Parts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    namespace: str
    key: str
    chunk: Chunk

    @property
    def num_values(self) -> int:
        from baton.stores.base.chunk_name import is_value

        return sum(map(is_value, self.chunk.names))


@contextmanager
def _opened(where: str, options: Sequence[str] | None, *, is_changed: bool) -> Iterator[Store]:
    """Yields the store. Its errors end the command.

    `is_changed`: the store is checked first. A value is written to a bucket for this.
    """
    from baton.core.errors import ConfigError
    from baton.stores.base.store import StoreError

    try:
        store = _store(where, options)
        if is_changed:
            store.check()
    except ConfigError as error:
        typer.echo(f"baton cache: {error}", err=True)
        raise typer.Exit(2) from error
    try:
        yield store
    except StoreError as error:
        typer.echo(f"baton cache: {store.where}: {error}", err=True)
        raise typer.Exit(1) from error
    finally:
        store.close()


def _store(where: str, options: Sequence[str] | None) -> Store:
    from baton.core.errors import ConfigError
    from baton.stores.backends.files import FileStore

    scheme = where.partition("://")[0] if "://" in where else ""
    if scheme in ("redis", "rediss", "unix"):
        from baton.stores.backends.redis import RedisStore

        return RedisStore(where, timeout_s=TIMEOUT_S, field="STORE")
    if scheme:
        from baton.stores.backends.objects import ObjectStore

        pairs = [option.partition("=") for option in options or ()]
        named = {name: value for name, _, value in pairs}
        return ObjectStore(where, named, timeout_s=TIMEOUT_S, field="STORE", options_field="--option")
    if not Path(where).is_dir():
        raise ConfigError(f"{where} is not a folder", field="STORE")
    return FileStore(Path(where))


def _found(store: Store, namespace: str | None) -> list[_Found]:
    from baton.stores.backends.sweep import chunks_of
    from baton.stores.base.chunk_name import chunk_of

    found = []
    for chunk in chunks_of(store):
        of_namespace, _, key = chunk_of(chunk.names[0]).split("/")[-3:]
        if namespace is None or of_namespace.startswith(namespace):
            found.append(_Found(of_namespace, key, chunk))
    return found


def _chosen(found: Iterable[_Found], keys: Sequence[str]) -> list[_Found]:
    if short := [key for key in keys if len(key) < KEY_DIGITS_MIN]:
        raise typer.BadParameter(f"{short[0]!r} has less than {KEY_DIGITS_MIN} digits of a key")
    chosen = [each for each in found if each.key.startswith(tuple(keys))]
    if missing := [key for key in keys if not any(each.key.startswith(key) for each in chosen)]:
        raise typer.BadParameter(f"no chunk has a key that begins with {missing[0]!r}")
    return chosen


def _is_proven(store: Store, name: str, size: int, memory: AlignedMemory, keys: list[bytes]) -> bool:
    """Whether a key proves the value; without keys, whether it seems whole. The key that does so goes first.

    Raises Unusable if no key could prove it.
    """
    from baton.stores.base.chunk_name import parse_name
    from baton.stores.base.store import Unusable
    from baton.stores.chunks.chunk import check_sealed

    parsed = parse_name(name)
    assert parsed is not None, "a scan finds names of chunks only"
    if size > VALUE_BYTES_MAX:
        raise Unusable("corrupt", f"it has {size} bytes")
    into = memory.take(size)
    check_sealed(into[: store.read(name, into)], parsed, None)
    for key in keys:
        try:
            # Read again, because a wrong key may have decrypted it.
            check_sealed(into[: store.read(name, into)], parsed, key)
        except Unusable as error:
            if error.reason in ("gone", "io"):
                raise
        else:
            keys.remove(key)
            keys.insert(0, key)
            return True
    return not keys


def _signing_keys(secret_file: str | None, *, is_insecure: bool) -> list[bytes]:
    """Keys from the cluster secret, if there is one: those of the connectors, and those of `BatonTier`."""
    from baton.connectors.storage.stores import identity
    from baton.core.errors import ConfigError
    from baton.core.secret_source import find_secret
    from baton.hosts.vllm.tier import rows

    if is_insecure:
        return [b""]
    try:
        found = find_secret(
            os.environ,
            file=secret_file,
            field="secret_file",
            is_file_first=True,
            moves_kv=False,
            is_insecure=False,
        )
    except ConfigError as error:
        typer.echo(f"baton cache: {error}", err=True)
        raise typer.Exit(2) from error
    if found.secret is None:
        return []
    purposes = (identity.KEY_PURPOSE, rows.KEY_PURPOSE)
    return [key for purpose in purposes for key in found.secret.derive_all(purpose)]


def _progress(what: str, items: Sequence[T]) -> Iterable[T]:
    """Return the items, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(items, description=what, console=console, disable=not console.is_terminal)


def _ago(used_s: float, now_s: float) -> str:
    if used_s == 0:
        return "unknown"
    from baton.stores.base.dates import age_s

    age = age_s(used_s, now_s)
    units: list[tuple[float, str]] = [(86400, "d"), (3600, "h"), (60, "min"), (1, "s")]
    size, unit = next((each for each in units if age >= each[0]), units[-1])
    return f"{age / size:.0f} {unit} ago"
