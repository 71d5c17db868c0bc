"""Drift check: compares vLLM's classes with our records of them, member by member.

    python -m baton.hosts.vllm.drift FOLDER      compare the vllm package in FOLDER (or the installed one)
    python -m baton.hosts.vllm.drift FOLDER --record 0.34
    python -m baton.hosts.vllm.drift OLD NEW     compare two packages, with the classes `WATCHED` too

A start compares too (`find_misfits`), and `versions` decides. Parses sources without importing them, so that
a version can be checked before it is installed. `record/` has one record per version tried. The newest one
lists what Baton relies on: to rely on another member, add it there, with any text, and record the versions
again. A member that an older version lacks and never needs is "missing" in its record. A record of a class
that we only use has

    name       a method, a function, a field, or an attribute that __init__ sets
    "name"     in quotes: this text occurs in the source, as a value that configurations use
    (bases)    the base classes, by which kinds of caches are told apart
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

from baton.hosts.vllm.versions import TESTED, release_of

Record: TypeAlias = dict[str, dict[str, str]]
"""{"path:Class", or "path:" for a module: {member: its kind and parameters}}."""

Scope: TypeAlias = ast.ClassDef | ast.Module
_ABSENT: Final = "not there"
MISSING: Final = "missing"
RECORDS: Final = Path(__file__).with_name("record")
BASES: Final = "(bases)"

_V1: Final = "distributed/kv_transfer/kv_connector/v1"
EXTENDED: Final = (
    f"{_V1}/base.py:KVConnectorBase_V1",
    f"{_V1}/base.py:SupportsHMA",
    f"{_V1}/base.py:KVConnectorTransferResults",
    f"{_V1}/metrics.py:KVConnectorStats",
    f"{_V1}/metrics.py:KVConnectorPromMetrics",
)
"""Classes that we extend. All members are recorded, because a method that vLLM adds is not forwarded yet."""

WATCHED: Final = (
    "distributed/kv_events.py:BlockStored",
    "distributed/kv_events.py:BlockRemoved",
    "entrypoints/openai/chat_completion/protocol.py:ChatCompletionRequest",
    "entrypoints/openai/completion/protocol.py:CompletionRequest",
    "v1/kv_offload/base.py:OffloadingWorker",
    "v1/kv_offload/cpu/shared_offload_region.py:SharedOffloadRegion",
    "v1/kv_offload/tiering/base.py:SecondaryTierManager",
    "v1/kv_offload/tiering/spec.py:TieringOffloadingSpec",
)
"""Formats of events and requests, and classes of tiers. No record has them: connectors do not need them."""


def describe(package: Path, relied_on: Record | None = None) -> Record:
    """Describe what is `relied_on` (None: the newest record) of the vllm package in this folder."""
    described: Record = {}
    for name, wanted in (load_record(TESTED[-1]) if relied_on is None else relied_on).items():
        path, _, class_name = name.partition(":")
        node = _find(package / path, class_name)
        if node is None:
            described[name] = {} if name in EXTENDED else dict.fromkeys(wanted, MISSING)
        elif name in EXTENDED or name in WATCHED:
            described[name] = members_of(node)
        else:
            known = {**_set_at_first(node), **members_of(node), **_texts_and_bases(node)}
            described[name] = {member: known.get(member, MISSING) for member in wanted}
    return described


def load_record(release: str) -> Record:
    """Load the record of a version. Raises FileNotFoundError if there is none."""
    record: Record = json.loads((RECORDS / f"{release}.json").read_text())
    return record


def differences(believed: Record, found: Record) -> list[str]:
    """Return one line for each member that is new, gone, or has other parameters."""
    return [_words(*change) for change in _changes(believed, found)]


def misfits(believed: Record, found: Record) -> list[str]:
    """Return the lines of `differences` that keep Baton's connectors from working, or may do so.

    What vLLM calls must be as recorded, and may have company that vLLM's base class answers. What we call
    must be there, and accept the calls that the recorded one accepts.
    """
    return [
        _words(*change)
        for change in _changes(believed, found)
        if (_breaks_extended if change[0] in (*EXTENDED, *WATCHED) else _breaks_used)(*change[1:])
    ]


def compare(old: Path, new: Path) -> list[str]:
    """Return the differences between two packages. "!" marks those that can break what Baton does."""
    wanted = load_record(TESTED[-1]) | {name: {} for name in WATCHED}
    before, now = describe(old, wanted), describe(new, wanted)
    breaking = set(misfits(before, now))
    return [f"{'!' if line in breaking else ' '} {line}" for line in differences(before, now)]


def find_misfits(package: Path, version: str) -> list[str]:
    """Return how this vllm package differs, in what matters, from the record of its version.

    A version without a record is compared with all of them, and the nearest one counts: members that are
    new in one version are missing in those before it. Takes 0.3 s.
    """
    found = describe(package)
    release = release_of(version)
    against = (release,) if release in TESTED else TESTED
    return min((misfits(load_record(one), found) for one in against), key=len)


def _changes(believed: Record, found: Record) -> Iterator[tuple[str, str, str, str]]:
    """Yield (class, member, recorded, found) of all members that differ."""
    for name in sorted(believed.keys() | found.keys()):
        ours, theirs = believed.get(name, {}), found.get(name, {})
        for member in sorted(ours.keys() | theirs.keys()):
            before, now = ours.get(member, _ABSENT), theirs.get(member, _ABSENT)
            if before != now:
                yield name, member, before, now


def _words(name: str, member: str, before: str, now: str) -> str:
    path, _, class_name = name.partition(":")
    return f"{class_name or Path(path).stem}.{member}: recorded {before}, found {now}"


def _breaks_extended(member: str, before: str, now: str) -> bool:
    return before != _ABSENT or "abstract" in now


def _breaks_used(member: str, before: str, now: str) -> bool:
    if before in (_ABSENT, MISSING):
        return False
    (kind, ours), (their_kind, theirs) = _parsed(before), _parsed(now)
    if member == BASES or kind != their_kind or len(theirs) < len(ours):
        return True
    is_kept = all(new in (old, f"{old}=") for old, new in zip(ours, theirs, strict=False))
    return not is_kept or any(
        not new.endswith("=") and not new.startswith("*") for new in theirs[len(ours) :]
    )


def _parsed(called: str) -> tuple[str, list[str]]:
    """ "property (self)" -> ("property ", ["self"])."""
    kind, _, parameters = called.removesuffix(")").partition("(")
    return kind, parameters.split(", ") if parameters else []


def installed_package() -> Path | None:
    """Return the folder of the vllm package that this interpreter would import, without importing it."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _find(path: Path, class_name: str) -> Scope | None:
    """Return the class, or the module if no class is named; None if there is none."""
    if not path.is_file():
        return None
    module = ast.parse(path.read_text())
    if not class_name:
        return module
    classes = (node for node in module.body if isinstance(node, ast.ClassDef))
    return next((node for node in classes if node.name == class_name), None)


def members_of(scope: Scope) -> dict[str, str]:
    """Return the members that a class or module defines in its own source, with their parameters."""
    members: dict[str, str] = {}
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            members[node.name] = _called(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members[node.target.id] = "attribute"
        elif isinstance(node, ast.Assign):
            members.update({t.id: "attribute" for t in node.targets if isinstance(t, ast.Name)})
    return members


def _set_at_first(scope: Scope) -> dict[str, str]:
    """Return the attributes that __init__ sets on self."""
    made = (node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return {
        target.attr: "attribute"
        for function in made
        for node in ast.walk(function)
        for target in _targets(node)
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    }


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        yield from node.targets
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def _texts_and_bases(scope: Scope) -> dict[str, str]:
    texts = {
        f'"{node.value}"': "text"
        for node in ast.walk(scope)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    if isinstance(scope, ast.ClassDef):
        texts[BASES] = ", ".join(ast.unparse(base) for base in scope.bases)
    return texts


def _called(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """ "classmethod (cls, vllm_config)": parameters by name; those with a default are marked with "="."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    names = [a.arg + ("" if i < num_required else "=") for i, a in enumerate(positional)]
    if arguments.vararg is not None:
        names.append(f"*{arguments.vararg.arg}")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        names.append(argument.arg + ("" if default is None else "="))
    if arguments.kwarg is not None:
        names.append(f"**{arguments.kwarg.arg}")
    kinds = sorted(ast.unparse(decorator) for decorator in node.decorator_list)
    return " ".join([*kinds, f"({', '.join(names)})"])


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else installed_package()
    if folder is None:
        print("vllm is not installed; give the folder of the package vllm as an argument")
        return 2
    is_pair = len(arguments) == 2 and arguments[1] != "--record"
    folders = [folder, Path(arguments[1])] if is_pair else [folder]
    for one in folders:
        if not (one / "__init__.py").is_file():
            print(f"{one} has no __init__.py; give the folder of the package vllm")
            return 2
    if is_pair:
        print(*compare(*folders), sep="\n")
        return 0
    found = describe(folder)
    if arguments[1:2] == ["--record"]:
        RECORDS.mkdir(exist_ok=True)
        text = json.dumps(found, indent=1, sort_keys=True)
        (RECORDS / f"{arguments[2]}.json").write_text(text + "\n")
        return 0
    for record in sorted(RECORDS.glob("*.json")):
        lines = differences(load_record(record.stem), found)
        print(f"{record.stem}: {len(lines)} differences", *lines, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
