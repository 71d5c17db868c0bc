"""Conformance of stores, each against its real medium: a folder, an S3 server, Redis, Valkey."""

import errno
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.stores.backends.files import FileStore
from baton.stores.backends.objects import ObjectStore
from baton.stores.backends.redis import RedisStore
from baton.stores.backends.sweep import LOW_WATER, Limits, Totals, read_totals, sweep
from baton.stores.backends.whole_file import TEMPORARY_PREFIX
from baton.stores.base.aligned import AlignedMemory
from baton.stores.base.chunk_name import ChunkName
from baton.stores.base.store import Store, StoreError, Unusable
from tests.stores.faulty_proxy import Fault, FaultyProxy
from tests.stores.servers import S3_OPTIONS, make_bucket, moto_server, rclone_server, redis_server
from tests.stores.transfers_world import World, damage

ROOM = 1 << 20
TIMEOUT_S = 30.0  # Reached only on failure.
SHORT_S = 0.5  # The deadline of a request that meets a fault.
BUCKET = "bucket"
LOCAL = ("files", "files, direct", "memory")
REMOTE = ("moto", "rclone", "redis", "valkey")


def _folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"another program's")


def _socket(path: Path) -> None:
    """The name of a socket is bound through its folder, because it has at most 107 bytes."""
    fileno = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{fileno}/socket")
    os.close(fileno)
    path.with_name("socket").rename(path)


PLACES: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"x"),
    "folder": Path.mkdir,
    "folder with a file": _folder_with_a_file,
    "pipe": os.mkfifo,
    "socket": _socket,
    "link to a file": lambda path: path.symlink_to(__file__),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path.name),
}
"""Things of other programs that can have the name of a value, or of its folder."""


@dataclass(slots=True)
class Medium:
    make: Callable[[float], Store]  # The argument: the deadline of a request.
    proxy: FaultyProxy | None = None


@pytest.fixture(scope="module", params=LOCAL + REMOTE)
def medium(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Medium]:
    kind: str = request.param
    folder = tmp_path_factory.mktemp("kv")
    with ExitStack() as stack:
        if kind.startswith("files"):
            yield Medium(lambda timeout_s: FileStore(folder, fsync=False, direct="direct" in kind))
            return
        if kind == "memory":
            shared = ObjectStore("memory:///", timeout_s=TIMEOUT_S)
            yield Medium(lambda timeout_s: shared)
            return
        if kind in ("redis", "valkey"):
            port, _ = stack.enter_context(redis_server(kind))
        elif kind == "moto":
            port = stack.enter_context(moto_server())
            make_bucket(port, BUCKET)
        else:
            (folder / BUCKET).mkdir()
            port, _ = stack.enter_context(rclone_server(folder))
        proxy = FaultyProxy(port)
        stack.callback(proxy.close)
        yield Medium(_makers(proxy.port)[kind], proxy)


def _makers(port: int) -> dict[str, Callable[[float], Store]]:
    """Functions that make a store, by kind of server. Their argument: the deadline of a request."""
    options = {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
    url = f"redis://127.0.0.1:{port}/0"

    def bucket(timeout_s: float) -> Store:
        return ObjectStore(f"s3://{BUCKET}/kv", options, timeout_s=timeout_s)

    def redis(timeout_s: float) -> Store:
        return RedisStore(url, timeout_s=timeout_s)

    return {"moto": bucket, "rclone": bucket, "redis": redis, "valkey": redis}


@pytest.fixture
def store(medium: Medium) -> Iterator[Store]:
    """Empty."""
    store = medium.make(TIMEOUT_S)
    store.check()
    store.remove([stored.name for stored in store.scan()])
    yield store
    store.close()


def name_of(number: int, rank: int = 0) -> str:
    return str(ChunkName("n" * 32, number.to_bytes(32, "big"), rank))


def read(store: Store, name: str, room: int = ROOM) -> bytes:
    memory = AlignedMemory().take(room)[:room]
    return bytes(memory[: store.read(name, memory)])


def replace_foreign(store: Store, put: Callable[[str], object], caplog: pytest.LogCaptureFixture) -> None:
    """`put` gives a chunk's name to something else: a load fails, the next save replaces it, and the store is
    used all the time.
    """
    world = World(store, ObjectStore("memory:///", timeout_s=TIMEOUT_S))  # A store that fails is set aside.
    put(world.name_of(1))
    world.found(1)
    world.load("job", (1, 5))
    assert world.reasons()[0] in ("gone", "foreign", "corrupt")
    world.fill_stores(1, 2)
    world.load("job", (1, 5), (2, 6))
    assert world.reasons() == [None, None]
    assert world.contents()[5:7] == [2, 3]
    assert read(store, world.name_of(1)) != read(store, world.name_of(2))
    assert "is not used" not in caplog.text
    assert "is not written" not in caplog.text


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 2 * ROOM])
def test_a_foreign_value_is_replaced(store: Store, nbytes: int, caplog: pytest.LogCaptureFixture) -> None:
    replace_foreign(store, lambda name: store.write(name, (os.urandom(nbytes),)), caplog)


def test_jobs_over_each_store(store: Store) -> None:
    """The rest of the asynchronous interface is in `test_transfers`."""
    world = World(store)
    world.fill_stores(0, 1, 2)
    damage(store, world.name_of(1))
    store.remove([world.name_of(2)])
    assert world.found(0, 1, 2) == [True, True, False]
    world.load("job", (0, 4), (1, 5), (2, 6))
    assert world.reasons() == [None, "corrupt", "gone"]
    assert world.contents()[4:7] == [1, 0, 0]
    assert store.sizes([world.name_of(1)]) == [None]


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 300_000])
def test_what_is_written_is_read(store: Store, nbytes: int) -> None:
    content = os.urandom(nbytes)
    store.write(name_of(1), (content[:100], memoryview(content)[100:]))
    assert read(store, name_of(1)) == content
    assert store.sizes([name_of(0), name_of(1), name_of(2)]) == [None, nbytes, None]


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 1), (0, 4096), (4096, 4096), (5, 4091), (8192, 3808), (11_999, 1), (0, 12_000)]
)
def test_a_part_is_read_alone(store: Store, start: int, nbytes: int) -> None:
    """Parts that begin and do not begin with a page, and the last one, which no whole page ends."""
    content = os.urandom(12_000)
    store.write(name_of(1), (content,))
    memory = AlignedMemory().take(16_384)
    store.read_part(name_of(1), memory, start, nbytes)
    assert memory[:nbytes] == content[start : start + nbytes]


def test_a_part_that_is_not_there_is_not_read(store: Store) -> None:
    store.write(name_of(1), (bytes(5000),))
    memory = AlignedMemory().take(8192)
    with pytest.raises(Unusable, match="gone"):
        store.read_part(name_of(2), memory, 0, 100)
    for start in (0, 4096, 8192):
        with pytest.raises(Unusable, match="corrupt"):
            store.read_part(name_of(1), memory, start, 8192)


def test_what_is_missing_is_gone(store: Store) -> None:
    with pytest.raises(Unusable, match="gone"):
        read(store, name_of(1))
    store.remove([name_of(1), name_of(2)])
    assert store.sizes([]) == []
    assert list(store.scan()) == []


def test_a_value_that_is_too_long_is_corrupt(store: Store) -> None:
    store.write(name_of(1), (bytes(5000),))
    with pytest.raises(Unusable, match="corrupt: it has 5000 bytes, at most 4096 are expected"):
        read(store, name_of(1), 4096)


def test_many_values_are_found_listed_and_removed(store: Store) -> None:
    names = [name_of(number, rank) for number in range(60) for rank in range(2)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: store.write(name, (name.encode(),)), names))
    assert store.sizes(names) == [len(name) for name in names]
    assert sorted(stored.name for stored in store.scan()) == sorted(names)
    store.remove(names)
    assert list(store.scan()) == []


@pytest.mark.parametrize(
    "name",
    [
        "models/ab/model-00001-of-00002.safetensors",
        f"{'n' * 32}/ab/adapter.safetensors",
        f"{'n' * 32}/ab/cdef.0.safetensors",
        f"{'n' * 32}/ab/notes.pin",
    ],
)
def test_what_is_not_ours_is_neither_found_nor_removed(store: Store, name: str) -> None:
    store.write(name, (b"weights",))
    assert list(store.scan()) == []
    sweep(store, Limits(1, 0.0), now_s=1e12)
    assert read(store, name) == b"weights"
    store.remove([name])


@pytest.mark.parametrize(
    ("keys", "skipped"),
    [
        (("models//x", "kv//x", "kv/./x", "kv/../x"), []),
        (("kv/a//x", "kv/a/b/../x"), ["a"]),
        (("kv/a/b/../x", f"kv/{'n' * 32}/80//x"), ["a/b", f"{'n' * 32}/80"]),
    ],
)
def test_keys_that_the_client_cannot_name_do_not_end_sweeps(
    keys: tuple[str, ...], skipped: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Objects of other programs. The client ends a listing at such a key with an error."""
    import boto3

    bucket = f"strange-{len(skipped)}"  # All of moto's servers in one process have the same buckets.
    with moto_server() as port:
        make_bucket(port, bucket)
        options = {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
        store = ObjectStore(f"s3://{bucket}/kv", options, timeout_s=TIMEOUT_S)
        names = [name_of(number) for number in (0, 1, 1 << 255)]
        for name in names:
            store.write(name, (b"x",))
        credentials = {f"aws_{name}": S3_OPTIONS[name] for name in ("access_key_id", "secret_access_key")}
        client = boto3.client(
            "s3", endpoint_url=options["endpoint"], region_name=options["region"], **credentials
        )
        for key in keys:
            client.put_object(Bucket=bucket, Key=key, Body=b"x")
        for _ in range(2):
            listed = [stored.name for stored in store.scan()]
            assert listed == [name for name in names if not name.startswith(tuple(skipped))]
    logged = [one.args for one in caplog.records if one.name.endswith("backends.objects")]
    assert [args[1] for args in logged if args] == skipped, "each folder once"


def test_a_sweep_removes_whole_chunks_the_least_recently_used_first(store: Store) -> None:
    if store.promise.evicts_itself:
        pytest.skip("the server evicts")
    for number in range(10):
        for rank in range(2):
            store.write(name_of(number, rank), (bytes(1000),))
            store.touch(name_of(number, rank), 1000.0 + number)
    swept = sweep(store, Limits(10_000, None), now_s=2000.0)
    left = {stored.name for stored in store.scan()}
    assert len(left) * 1000 == swept.kept_bytes <= LOW_WATER * 10_000
    assert read_totals(store) == Totals(swept.num_kept, swept.kept_bytes)
    assert all((name_of(number, 0) in left) == (name_of(number, 1) in left) for number in range(10))
    if store.promise.has_time_of_use:
        assert left == {name_of(number, rank) for number in range(6, 10) for rank in range(2)}


@pytest.mark.parametrize("fault", ["refuse", "hang", "cut"])
def test_a_network_fault_is_reported_and_ends(medium: Medium, store: Store, fault: Fault) -> None:
    if medium.proxy is None:
        pytest.skip("it has no network")
    content = os.urandom(200_000)
    store.write(name_of(1), (content,))
    impatient = medium.make(SHORT_S)
    medium.proxy.fault = fault
    medium.proxy.cut()
    try:
        with pytest.raises(Unusable, match="io"):
            read(impatient, name_of(1))
        if fault != "cut":  # The answers to these are shorter than the piece that is forwarded.
            with pytest.raises(StoreError):
                impatient.sizes([name_of(1)])
            with pytest.raises(StoreError):
                impatient.write(name_of(2), (content,))
            with pytest.raises(StoreError):
                list(impatient.scan())
            with pytest.raises(ConfigError):
                impatient.check()
    finally:
        medium.proxy.fault = ""
        medium.proxy.cut()
        impatient.close()
    assert read(store, name_of(1)) == content


def test_readers_see_whole_values_while_others_write_and_remove(store: Store) -> None:
    """The last of the tests of a server: on a busy machine it may carry out a write after its deadline."""
    contents = [bytes([letter]) * 70_000 for letter in b"ab"]
    done, problems = threading.Event(), []

    def write(content: bytes) -> None:
        for _ in range(8):
            with suppress(StoreError):  # moto fails some of two requests for one object.
                store.write(name_of(1), (content,))
                store.remove([name_of(1)])

    def look() -> None:
        while not done.is_set():
            try:
                found = read(store, name_of(1))
            except Unusable as error:
                if error.reason not in ("gone", "io"):  # rclone fails if a file changes while it is read.
                    problems.append(str(error))
            else:
                if found not in contents:
                    problems.append(f"a mixture of {set(found)}, {len(found)} bytes")

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, contents))
    done.set()
    for reader in readers:
        reader.join()
    assert problems == []


@pytest.mark.parametrize("kind", ["rclone", "redis"])
def test_a_server_that_is_stopped_is_reported_and_used_again(kind: str, tmp_path: Path) -> None:
    """SIGSTOP: the kernel still accepts connections, and no answer comes."""
    (tmp_path / BUCKET).mkdir()
    with redis_server(kind) if kind == "redis" else rclone_server(tmp_path) as (port, process):
        make = _makers(port)[kind]
        patient, impatient = make(TIMEOUT_S), make(SHORT_S)
        patient.write(name_of(1), (b"content",))
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # All threads of the server have stopped.
        try:
            with pytest.raises(StoreError):
                impatient.sizes([name_of(1)])
            with pytest.raises(StoreError):
                impatient.write(name_of(2), (b"other",))
            with pytest.raises(Unusable, match="io"):
                read(impatient, name_of(1))
        finally:
            process.send_signal(signal.SIGCONT)
        assert read(impatient if kind == "redis" else patient, name_of(1)) == b"content"
        patient.close()
        impatient.close()


def test_requests_to_a_bucket_are_counted() -> None:
    store = ObjectStore("memory:///", timeout_s=TIMEOUT_S)
    store.write(name_of(1), (b"content",))
    store.sizes([name_of(1), name_of(2)])
    read(store, name_of(1))
    store.remove([name_of(1)])
    assert store.take_requests() == {"put": 1, "head": 2, "get": 1, "delete": 1}
    assert store.take_requests() == {}


# --- Each medium's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_file_system_that_fails_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    store, name = FileStore(tmp_path), name_of(1)
    store.write(name, (b"old",))
    real = getattr(os, call)

    def fail(first: object, *args: object, **options: object) -> object:
        if call == "fsync" or TEMPORARY_PREFIX in str(first):
            raise OSError(code, os.strerror(code))
        return real(first, *args, **options)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StoreError, match=os.strerror(code)):
        store.write(name, (b"new",))
    monkeypatch.undo()
    assert read(store, name) == b"old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(name).name]


def test_reads_that_are_interrupted_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, content, readv = FileStore(tmp_path), os.urandom(10_000), os.readv
    store.write(name_of(1), (content,))
    monkeypatch.setattr(os, "readv", lambda fileno, views: readv(fileno, [views[0][:777]]))
    assert read(store, name_of(1)) == content


def test_a_file_that_shrinks_while_it_is_read_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, readv = FileStore(tmp_path), os.readv
    store.write(name_of(1), (bytes(10_000),))

    def cut(fileno: int, views: list[memoryview]) -> int:
        os.truncate(tmp_path / name_of(1), 1000)
        return readv(fileno, views)

    monkeypatch.setattr(os, "readv", cut)
    with pytest.raises(Unusable, match="corrupt: it became shorter"):
        read(store, name_of(1))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("place", sorted({*PLACES} - {"file"}))
def test_what_is_no_file_is_not_read(tmp_path: Path, place: str, direct: bool) -> None:
    """Neither is a file read to which a symbolic link leads: it may be another user's."""
    PLACES[place](tmp_path / "value")
    with pytest.raises(Unusable, match="foreign"):
        read(FileStore(tmp_path, direct=direct), "value", 4096)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("place", sorted(PLACES))
def test_what_has_the_place_of_a_value_or_of_its_folder_is_replaced(
    tmp_path: Path, place: str, depth: int, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path / "kv", direct=direct)
    store.check()
    if (place, depth) != ("file", 3) and not (place.startswith("folder") and depth < 3):
        replace_foreign(store, lambda name: _put(PLACES[place], store.folder, name, depth), caplog)


def _put(make: Callable[[Path], object], folder: Path, name: str, depth: int) -> None:
    path = folder.joinpath(*name.split("/")[:depth])
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)


def test_a_folder_under_the_name_of_a_value_keeps_its_files(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    _put(PLACES["folder with a file"], tmp_path, name_of(1), 3)
    store.write(name_of(1), (b"value",))
    (aside,) = (tmp_path / name_of(1)).parent.glob(".foreign-*")
    assert (aside / "file").read_bytes() == b"another program's"
    assert [stored.name for stored in store.scan()] == [name_of(1)]


@pytest.mark.parametrize("kind", ["redis", "valkey"])
@pytest.mark.parametrize("command", ["RPUSH K x", "SADD K x", "HSET K x y", "ZADD K 1 x", "XADD K * x y"])
def test_a_key_of_another_type_is_replaced(kind: str, command: str, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(kind) as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}", timeout_s=TIMEOUT_S)

        def put(name: str) -> None:
            store._client.execute_command(*command.replace("K", f"baton:kv:{name}").split())

        put(name_of(1))
        memory = memoryview(bytearray(ROOM))
        for look in (
            lambda: store.read(name_of(1), memory),
            lambda: store.read_part(name_of(1), memory, 0, 9),
        ):
            with pytest.raises(Unusable, match="foreign"):
                look()
        replace_foreign(store, put, caplog)


def test_an_object_that_was_moved_to_an_archive_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    import boto3

    with moto_server() as port:
        make_bucket(port, "archived")
        options = {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
        store = ObjectStore("s3://archived/kv", options, timeout_s=TIMEOUT_S)
        credentials = {f"aws_{name}": S3_OPTIONS[name] for name in ("access_key_id", "secret_access_key")}
        client = boto3.client(
            "s3", endpoint_url=options["endpoint"], region_name=options["region"], **credentials
        )

        def put(name: str) -> None:
            client.put_object(Bucket="archived", Key=f"kv/{name}", Body=bytes(9000), StorageClass="GLACIER")

        put(name_of(1))
        with pytest.raises(Unusable, match="foreign"):
            store.read_part(name_of(1), memoryview(bytearray(ROOM)), 0, 9)
        replace_foreign(store, put, caplog)


def test_a_folder_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a folder is, for example, lost+found or another user's namespace."""
    store, scandir = FileStore(tmp_path), os.scandir
    store.write(name_of(1), (b"x",))
    (tmp_path / "lost+found").mkdir()

    def refuse(path: str) -> Any:
        if path.endswith("lost+found"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert sweep(store, Limits(0, None), now_s=0.0).evicted == [name_of(1)]


def test_a_file_that_cannot_be_examined_does_not_end_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, scandir = FileStore(tmp_path), os.scandir
    for number in range(2):
        store.write(name_of(number), (b"x",))

    @contextmanager
    def scanned(path: str) -> Iterator[Any]:
        with scandir(path) as entries:
            yield [StaleEntry(entry) if entry.name == Path(name_of(0)).name else entry for entry in entries]

    monkeypatch.setattr(os, "scandir", scanned)
    assert sweep(store, Limits(0, None), now_s=0.0).evicted == [name_of(1)]


@dataclass
class StaleEntry:
    entry: os.DirEntry[str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.entry, name)

    def stat(self) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_direct_reads_and_writes_match_cached_ones(tmp_path: Path) -> None:
    direct, cached = FileStore(tmp_path, direct=True), FileStore(tmp_path)
    direct.check()
    for nbytes in (1, 4096, 12_345):
        content = os.urandom(nbytes)
        direct.write(name_of(nbytes), (content,))
        assert read(cached, name_of(nbytes)) == read(direct, name_of(nbytes)) == content


@pytest.mark.parametrize("url", ["s3://", "nothing", "ftp://host/x", "http://["])
def test_a_wrong_url_of_objects_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="url: "):
        ObjectStore(url, timeout_s=TIMEOUT_S).check()


@pytest.mark.parametrize("url", ["nothing", "http://host"])
def test_a_wrong_url_of_redis_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="url: is not the URL of a Redis server"):
        RedisStore(url, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("make", "url", "shown"),
    [
        (ObjectStore, "http://user:PASSWORD@127.0.0.1:1/bucket?sig=PASSWORD", "http://127.0.0.1:1/bucket"),
        (ObjectStore, "ftp://user:PASSWORD@host/x?sig=PASSWORD", "ftp://host/x"),
        (RedisStore, "redis://user:PASSWORD@127.0.0.1:1/3", "redis://127.0.0.1:1/3"),
        (RedisStore, "redis://:PASSWORD/more@127.0.0.1:1/3", "percent-encoded"),
        (RedisStore, "redis://127.0.0.1:1/3?pasword=PASSWORD", "unexpected keyword argument"),
    ],
)
def test_errors_do_not_show_credentials(make: Callable[..., Store], url: str, shown: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make(url, timeout_s=SHORT_S).check()
    assert shown in str(raised.value)
    assert "PASSWORD" not in str(raised.value).replace("redis://:PASSWORD@HOST", "")


def test_a_bucket_that_does_not_exist_is_a_configuration_error() -> None:
    with moto_server() as port:
        options = {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
        with pytest.raises(ConfigError, match="cannot be used"):
            ObjectStore("s3://nothing/kv", options, timeout_s=TIMEOUT_S).check()


def test_names_in_redis_lead_out_of_no_folder() -> None:
    with redis_server("valkey") as server:
        store = RedisStore(f"redis://127.0.0.1:{server.port}", timeout_s=TIMEOUT_S)
        for name in ("../../ab/abcd.0.safetensors", "../.bashrc", "x"):
            store.write(name, (b"x",))
        store._client.set(b"baton:kv:\xff", b"x")
        assert list(store.scan()) == []


def test_redis_removes_what_is_not_used() -> None:
    with redis_server("valkey") as server:
        url = f"redis://127.0.0.1:{server.port}"
        store, lasting = (RedisStore(url, timeout_s=TIMEOUT_S, ttl_s=ttl_s) for ttl_s in (100.0, None))
        assert store.promise.has_time_of_use
        store.write(name_of(1), (b"x",))
        lasting.write(name_of(2), (b"x",))
        client = store._client
        assert 0 < client.pttl(f"baton:kv:{name_of(1)}") <= 100_000
        assert client.pttl(f"baton:kv:{name_of(2)}") == -1
        client.pexpire(f"baton:kv:{name_of(1)}", 50_000)
        store.touch(name_of(1), 0.0)
        assert client.pttl(f"baton:kv:{name_of(1)}") > 50_000
