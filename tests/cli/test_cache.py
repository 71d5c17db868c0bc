"""`baton cache` on a folder with chunks of two namespaces."""

import os
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from baton.cli.cache import app
from baton.connectors.storage.stores.identity import KEY_PURPOSE
from baton.core.config import ClusterSecret
from baton.hosts.vllm.tier import rows
from baton.stores.backends.files import FileStore
from baton.stores.base.chunk_name import ChunkName, parse_name
from baton.stores.chunks.chunk import seal
from tests.stores.servers import S3_OPTIONS, rclone_server, redis_server

SECRET = "a secret of a length that is enough"
ENTRIES = {"layer": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}
NAMES = [
    ChunkName(namespace, bytes([number]) * 32, rank)
    for namespace, numbers in {"aaaa": (1, 2), "bbbb": (3,)}.items()
    for number in numbers
    for rank in range(2)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    key = ClusterSecret(SECRET.encode()).derive(KEY_PURPOSE)
    for index, name in enumerate(NAMES):
        header, body = seal(name, ENTRIES, memoryview(bytes([index]) * 100), key, encrypts=index == 0)
        FileStore(tmp_path, fsync=False).write(str(name), (header, body))
        os.utime(name.path_in(tmp_path), (1000 + index, 1000 + index))
    return tmp_path


def run(*arguments: object, secret: str | None = SECRET) -> Result:
    environment = {"BATON_SECRET": secret, "COLUMNS": "200", "TERM": "dumb"}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment)


def printed(*arguments: object, secret: str | None = SECRET) -> str:
    ended = run(*arguments, secret=secret)
    assert ended.exit_code == 0, ended.output
    return " ".join(ended.output.split())


def damage(folder: Path, name: ChunkName) -> None:
    content = name.path_in(folder).read_bytes()
    name.path_in(folder).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_names_are_parsed() -> None:
    for name in (*NAMES, ChunkName("n", b"k", 3, 0), ChunkName("n", b"k", 3, 128)):
        assert parse_name(str(name)) == name
    assert parse_name("README") is None


def test_namespaces_and_chunks_are_listed(folder: Path) -> None:
    listed = printed("ls", folder)
    assert "aaaa" in listed
    assert "bbbb" in listed
    of_one = printed("ls", folder, "--chunks", "--namespace", "b")
    assert (NAMES[4].key.hex() in of_one, NAMES[0].key.hex() in of_one) == (True, False)
    assert printed("ls", folder, "--namespace", "c") == "no chunks"


def test_totals_and_promises_are_shown(folder: Path) -> None:
    shown = printed("stat", folder)
    assert "2 namespaces, 3 chunks 6 values" in shown
    assert "survives power loss: yes" in shown


def test_every_value_is_verified_with_the_secret(folder: Path) -> None:
    assert printed("verify", folder) == "6 of 6 values can be used (verified)"
    damage(folder, NAMES[3])
    ended = run("verify", folder)
    assert ended.exit_code == 1
    assert "5 of 6" in ended.output
    assert f"{NAMES[3]}: corrupt: its checksum is wrong" in ended.output
    assert "headers and lengths only" in printed("verify", folder, secret=None), "without a secret"
    assert run("verify", folder, "--remove").exit_code == 1
    assert not NAMES[3].path_in(folder).exists()
    assert "5 of 5" in printed("verify", folder)


def test_another_secret_proves_and_removes_nothing(folder: Path) -> None:
    ended = run("verify", folder, "--remove", secret="another secret of enough characters")
    assert ended.exit_code == 1
    assert "0 of 6 values" in ended.output
    assert "6 are in namespaces of which the secret proves no value, and stay: aaaa, bbbb" in ended.output
    assert all(name.path_in(folder).exists() for name in NAMES)


@pytest.mark.parametrize("encrypts", [False, True])
def test_chunks_of_the_tier_in_vllm_are_verified(tmp_path: Path, encrypts: bool) -> None:
    key = ClusterSecret(SECRET.encode()).derive(rows.KEY_PURPOSE)
    header, body = seal(NAMES[0], ENTRIES, memoryview(bytes(100)), key, encrypts=encrypts)
    FileStore(tmp_path, fsync=False).write(str(NAMES[0]), (header, body))
    assert printed("verify", tmp_path, "--remove") == "1 of 1 values can be used (verified)"


def test_a_header_that_contradicts_the_length_is_found_without_a_secret(folder: Path) -> None:
    path = NAMES[1].path_in(folder)
    path.write_bytes(path.read_bytes()[:-1])
    NAMES[2].path_in(folder).write_bytes(NAMES[4].path_in(folder).read_bytes())
    ended = run("verify", folder, secret=None)
    assert "4 of 6" in ended.output
    assert "which its header contradicts" in ended.output
    assert "names another chunk" in ended.output


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b'{"__metadata__": 3}',
        b'{"\xff\xff": {"data_offsets": [0, 0]}}',
        b'{"x": {"y": 1}}',
        b"[" * 10_000,
    ],
)
@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_damaged_header_does_not_end_verify(folder: Path, header: bytes, secret: str | None) -> None:
    NAMES[1].path_in(folder).write_bytes(len(header).to_bytes(8, "little") + header)
    ended = run("verify", folder, secret=secret)
    assert f"{NAMES[1]}: corrupt: its header cannot be read" in ended.output
    assert "5 of 6 values can be used" in ended.output


def test_pinned_chunks_stay(folder: Path) -> None:
    key = NAMES[0].key.hex()
    assert printed("pin", folder, key[:8]) == "1 chunks are pinned"
    assert "1 chunks are pinned" in printed("stat", folder)
    assert printed("evict", folder, "--unused-s", "10").startswith("removed 2 chunks")
    assert printed("evict", folder, key).startswith("removed 0 chunks")
    assert [name.path_in(folder).exists() for name in NAMES] == [True, True, False, False, False, False]
    assert printed("pin", folder, key, "--undo") == "1 chunks are no longer pinned"
    assert printed("evict", folder, key).startswith("removed 1 chunks")
    assert printed("ls", folder) == "no chunks"


def test_a_namespace_is_removed(folder: Path) -> None:
    assert printed("evict", folder, "--namespace", "aaaa").startswith("removed 2 chunks")
    assert printed("ls", folder, "--chunks").count(NAMES[4].key.hex()) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["evict"], "name keys, or set --namespace"),
        (["evict", "ab"], "less than 6 digits"),
        (["evict", "--namespace", "aaaa", "--unused-s", "1"], "are for all chunks"),
        (["pin", "abcdef12"], "no chunk has a key that begins with 'abcdef12'"),
    ],
)
def test_wrong_arguments_remove_nothing(folder: Path, arguments: list[str], problem: str) -> None:
    ended = run(arguments[0], folder, *arguments[1:])
    assert ended.exit_code == 2
    assert problem in " ".join(ended.output.replace("│", " ").split())
    assert all(name.path_in(folder).exists() for name in NAMES)


def test_a_store_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for arguments, status, problem in (
        (["ls", tmp_path / "x"], 2, "is not a folder"),
        (["ls", "redis://127.0.0.1:1"], 1, "redis://127.0.0.1:1: Error 111"),
        (["evict", "redis://127.0.0.1:1", "abcdef"], 2, "does not answer"),
    ):
        ended = run(*arguments)
        assert ended.exit_code == status
        assert problem in ended.output


def test_a_bucket_that_may_only_be_read_is_shown_and_copied(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    with rclone_server(folder.parent, "--read-only") as (port, _):
        endpoint = {**S3_OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
        options = [f"--option={name}={value}" for name, value in endpoint.items()]
        bucket = f"s3://{folder.name}"
        assert "2 namespaces, 3 chunks 6 values" in printed("stat", bucket, *options)
        assert "6 of 6" in printed("verify", bucket, *options)
        assert printed("warm", bucket, other, *options).startswith("copied 6 values")
        assert run("evict", bucket, NAMES[0].key.hex(), *options).exit_code == 2


def test_a_store_is_warmed_from_another(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    assert printed("warm", folder, other, "--namespace", "bbbb").startswith("copied 2 values")
    assert printed("warm", folder, other).startswith("copied 4 values")
    assert printed("verify", other) == "6 of 6 values can be used (verified)"
    assert printed("warm", folder, other).startswith("copied 0 values")


def test_what_is_old_in_redis_is_not_known(folder: Path) -> None:
    with redis_server("valkey") as (port, _):
        url = f"redis://127.0.0.1:{port}"
        assert printed("warm", folder, url).startswith("copied 6 values")
        ended = run("evict", url, "--unused-s", "3600")
        assert ended.exit_code == 2
        assert "evicts by its own policy" in ended.output
        assert "2 namespaces, 3 chunks 6 values" in printed("stat", url)
