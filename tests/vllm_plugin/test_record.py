"""The connector forwards every method of a recorded vLLM, with its parameters. Runs without vLLM."""

import ast
from pathlib import Path

import pytest

import baton.hosts.vllm
from baton.contract.surface import SURFACE
from baton.hosts.vllm.drift import (
    BASES,
    EXTENDED,
    MISSING,
    RECORDS,
    WATCHED,
    compare,
    describe,
    differences,
    find_misfits,
    load_record,
    main,
    members_of,
    misfits,
)
from baton.hosts.vllm.versions import TESTED

BASE = EXTENDED[0]
HMA = EXTENDED[1]
MODULES = {"_custom_ops"}  # Imported whole; the parts used are recorded.
AN_INSTANCE_OF = {"current_platform": "Platform"}
OURS_ALONE = {"role"}  # Answered by the base class.
OPTIONAL = {
    "0.31": {
        "v1/kv_cache_interface.py:KVCacheConfig": {"hash_block_size"},  # Needed for KV events.
        "v1/metrics/cache_hit_source.py:CacheHitSource": {"DISK", "EXTERNAL_UNSPECIFIED", "HOST", "P2P"},
    }
}
"""What a version lacks, and does not need: it does not call the hook, or a start is refused by name."""


@pytest.fixture(scope="module")
def forwarded() -> dict[str, str]:
    """Signatures as the connector defines them, or as the contract does for those forwarded by the table."""
    package = Path(baton.hosts.vllm.__file__).parent
    classes = {
        node.name: members_of(node)
        for source in (package / "forwarding.py", package.parents[1] / "contract" / "base.py")
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    halves = classes["KVConnectorSchedulerHalf"] | classes["KVConnectorWorkerHalf"]
    by_table = {name: called for name, called in halves.items() if name in SURFACE}
    return by_table | classes["ForwardingConnector"]


def test_every_tested_version_is_recorded() -> None:
    assert {record.stem for record in RECORDS.glob("*.json")} == set(TESTED)


@pytest.mark.parametrize("release", TESTED)
def test_each_method_is_forwarded_by_name_with_its_parameters(
    release: str, forwarded: dict[str, str]
) -> None:
    record = load_record(release)
    for name, called in (record[BASE] | record[HMA]).items():
        if name in OURS_ALONE:
            continue
        assert name in forwarded, f"{name} has no row in baton/contract/surface.py"
        assert forwarded[name].replace("abstractmethod ", "") == called.replace("abstractmethod ", ""), name


@pytest.mark.parametrize("release", TESTED)
def test_what_is_imported_from_vllm_is_recorded(release: str) -> None:
    record = load_record(release)
    recorded = {name.partition(":")[2] for name in record} | MODULES
    recorded |= {member for name, members in record.items() if name.endswith(":") for member in members}
    imported = {
        (file.name, AN_INSTANCE_OF.get(alias.name, alias.name))
        for file in Path(baton.hosts.vllm.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }
    assert ("block_events.py", "resolve_block_hashes") in imported
    assert [(file, name) for file, name in sorted(imported) if name not in recorded] == []


@pytest.mark.parametrize("release", TESTED)
def test_every_recorded_version_has_what_we_rely_on(release: str) -> None:
    lacking = {
        name: {member for member, found in members.items() if found == MISSING}
        for name, members in load_record(release).items()
        if MISSING in members.values()
    }
    assert lacking == OPTIONAL.get(release, {})


@pytest.mark.parametrize(
    ("names", "files"),
    [
        ({"bind_gpu_block_pool", "block_pool"}, {"forwarding.py"}),
        ({"touch", "free_blocks", "get_num_free_blocks"}, {"lent_blocks.py"}),
        ({"KVConnectorPromMetrics"}, {"stats.py"}),
        ({"CacheHitSource"}, {"forwarding.py"}),
        ({"KVConnectorFactory"}, {"registration.py"}),
        ({"_all_token_ids"}, {"host_policy.py"}),
    ],
)
def test_what_vllm_may_move_has_one_place(names: set[str], files: set[str]) -> None:
    """The table in docs/vllm.md lists the same."""
    found = {
        file.name
        for file in Path(baton.hosts.vllm.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.alias) and node.name in names)
    }
    assert found == files


def test_fields_functions_texts_and_bases_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "KIND = Literal['one', 'two']\n"
        "def resolve(a, *, b=1): ...\n"
        "class Spec(Base, Generic[T]):\n"
        "    size: int\n"
        "    def __init__(self, other):\n"
        "        if other:\n"
        "            self.salt: str = other.other\n"
        "        other.hidden = self.unset\n"
    )
    wanted = {
        "a.py:": dict.fromkeys(("resolve", "KIND", '"two"', '"three"', "salt"), ""),
        "a.py:Spec": dict.fromkeys((BASES, "size", "salt", "hidden", "unset"), ""),
    }
    assert describe(tmp_path, wanted) == {
        "a.py:": {
            "resolve": "(a, b=)",
            "KIND": "attribute",
            '"two"': "text",
            '"three"': MISSING,
            "salt": MISSING,
        },
        "a.py:Spec": {
            BASES: "Base, Generic[T]",
            "size": "attribute",
            "salt": "attribute",
            "hidden": MISSING,
            "unset": MISSING,
        },
    }


def test_differences_are_named() -> None:
    before = {"base.py:Base": {"gone": "(self)", "kept": "(self)", "changed": "(self, a)"}}
    now = {"base.py:Base": {"kept": "(self)", "changed": "(self, a, b=)", "new": "property (self)"}}
    assert differences(before, now) == [
        "Base.changed: recorded (self, a), found (self, a, b=)",
        "Base.gone: recorded (self), found not there",
        "Base.new: recorded not there, found property (self)",
    ]
    assert differences({"a/module.py:": {"f": "()"}}, {}) == ["module.f: recorded (), found not there"]


USED, EXTENDS = "v1/a.py:Used", BASE
RECORDED = {USED: {"called": "(self, a)", "field": "attribute", BASES: "Spec", "optional": MISSING}}


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"called": "(self, a=, b=, *c, d=, **e)"}, True),
        ({"called": "(self, a, b)"}, False),
        ({"called": "(self)"}, False),
        ({"called": "(self, b)"}, False),
        ({"called": "classmethod (self, a)"}, False),
        ({"field": MISSING}, False),
        ({"field": "property (self)"}, False),
        ({BASES: "Spec, Other"}, False),
        ({"optional": "attribute"}, True),
    ],
)
def test_what_we_use_must_accept_our_calls(change: dict[str, str], fits: bool) -> None:
    found = {USED: RECORDED[USED] | change}
    assert (misfits(RECORDED, found) == []) == fits
    assert len(differences(RECORDED, found)) == len(change)


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ({"hook": "(self, a)", "new": "(self)"}, True),
        ({"hook": "(self, a)", "new": "abstractmethod (self)"}, False),
        ({"hook": "(self, a, b=)"}, False),
        ({}, False),
    ],
)
def test_what_vllm_calls_must_be_as_recorded(found: dict[str, str], fits: bool) -> None:
    assert (misfits({EXTENDS: {"hook": "(self, a)"}}, {EXTENDS: found}) == []) == fits


def test_a_version_without_a_record_is_compared_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the sources of a vLLM that is a mixture: 0.32 with one member of 0.33."""
    between = load_record("0.32")
    between = {
        **between,
        BASE: between[BASE] | {"restore_kv_caches": load_record("0.33")[BASE]["restore_kv_caches"]},
    }
    monkeypatch.setattr("baton.hosts.vllm.drift.describe", lambda package: between)
    assert find_misfits(tmp_path, "0.34.0") == [], "nothing of 0.32 is missing"
    assert find_misfits(tmp_path, "0.33.1") == [
        f"KVConnectorBase_V1.{name}: recorded {load_record('0.33')[BASE][name]}, found not there"
        for name in ("supports_sleep_mode", "unregister_kv_caches")
    ]


def test_two_packages_are_compared_with_what_is_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events, workers = ((name.partition(":")) for name in (WATCHED[0], WATCHED[4]))
    sources = {
        "old": ("", "def submit_load(self, job_id): ..."),
        "new": ("    lookahead_token_ids: int\n", "def submit_load(self, job_id, expedited=False): ..."),
    }
    for release, (field, method) in sources.items():
        for (path, _, name), text in ((events, f"    token_ids: int\n{field}"), (workers, f"    {method}\n")):
            (tmp_path / release / path).parent.mkdir(parents=True)
            (tmp_path / release / path).write_text(f"class {name}:\n{text}")
        (tmp_path / release / "__init__.py").touch()
    lines = compare(tmp_path / "old", tmp_path / "new")
    assert lines == [
        "  BlockStored.lookahead_token_ids: recorded not there, found attribute",
        "! OffloadingWorker.submit_load: recorded (self, job_id), found (self, job_id, expedited=)",
    ]
    assert main([str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert main([str(tmp_path / "old"), str(tmp_path)]) == 2


def test_a_package_without_what_we_need_is_described(tmp_path: Path) -> None:
    found = describe(tmp_path)
    assert found[BASE] == {}
    assert set(found["v1/core/block_pool.py:BlockPool"].values()) == {MISSING}
    assert len(find_misfits(tmp_path, "0.99")) > 100


def test_sources_are_read_without_being_imported(tmp_path: Path) -> None:
    record = load_record(TESTED[0])
    for name in record:
        path, _, class_name = name.partition(":")
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text() if file.exists() else "raise AssertionError('imported')\n"
        if class_name:
            text += f"class {class_name}:\n    @property\n    def role(self, a, b=1, *c, d, e=2, **f): ...\n"
        file.write_text(text)
    found = describe(tmp_path)
    assert found[BASE] == {"role": "property (self, a, b=, *c, d, e=, **f)"}
    assert set(found["v1/core/block_pool.py:BlockPool"].values()) == {"missing"}
