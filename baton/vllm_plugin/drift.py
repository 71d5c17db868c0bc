"""What we believe of vLLM's classes, and what a vLLM at hand says: the difference, name by name.

    python -m baton.vllm_plugin.drift FOLDER      compare the vllm package in FOLDER (or the installed one)
    python -m baton.vllm_plugin.drift FOLDER --record 0.34

Reads sources without importing them, so that a version can be looked at before it is installed. The records
lie in `record/`, one for each version that has been tried. Of classes that we extend all methods are
recorded: one that vLLM adds is one that we do not forward. Of those that we only use, what we use.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

Record: TypeAlias = dict[str, dict[str, str]]
"""By "module:Class": by member, its kind and parameters."""

_V1: Final = "distributed/kv_transfer/kv_connector/v1"
EXTENDED: Final = (
    f"{_V1}/base.py:KVConnectorBase_V1",
    f"{_V1}/base.py:SupportsHMA",
    f"{_V1}/base.py:KVConnectorTransferResults",
    f"{_V1}/metrics.py:KVConnectorStats",
    f"{_V1}/metrics.py:KVConnectorPromMetrics",
)
USED: Final[Mapping[str, tuple[str, ...]]] = {
    "distributed/kv_transfer/kv_connector/factory.py:KVConnectorFactory": ("_registry", "register_connector"),
    "v1/core/block_pool.py:BlockPool": ("touch", "free_blocks", "get_num_free_blocks"),
    "v1/core/sched/output.py:NewRequestData": (
        "req_id",
        "prompt_token_ids",
        "block_ids",
        "num_computed_tokens",
    ),
    "v1/core/sched/output.py:CachedRequestData": (
        "req_ids",
        "resumed_req_ids",
        "new_block_ids",
        "num_computed_tokens",
    ),
    "v1/core/sched/output.py:SchedulerOutput": (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
    ),
    "v1/outputs.py:KVConnectorOutput": (
        "finished_sending",
        "finished_recving",
        "kv_connector_worker_meta",
        "invalid_block_ids",
    ),
    "v1/metrics/cache_hit_source.py:CacheHitSource": ("HOST", "P2P"),
}
RECORDS: Final = Path(__file__).with_name("record")


def describe(package: Path) -> Record:
    """Of the vllm package in this folder. Raises FileNotFoundError, LookupError for what is not there."""
    described: Record = {}
    for name in (*EXTENDED, *USED):
        path, _, class_name = name.partition(":")
        members = members_of(_find_class(package / path, class_name))
        if (wanted := USED.get(name)) is not None:
            members = {member: members.get(member, "missing") for member in wanted}
        described[name] = members
    return described


def load_record(release: str) -> Record:
    """Raises FileNotFoundError for a version that was never recorded."""
    record: Record = json.loads((RECORDS / f"{release}.json").read_text())
    return record


def differences(believed: Record, found: Record) -> list[str]:
    """One line for each member that is new, gone, or called differently."""
    lines: list[str] = []
    for name in sorted(believed.keys() | found.keys()):
        ours, theirs = believed.get(name, {}), found.get(name, {})
        for member in sorted(ours.keys() | theirs.keys()):
            before, now = ours.get(member, "not there"), theirs.get(member, "not there")
            if before != now:
                lines.append(f"{name.rpartition(':')[2]}.{member}: believed {before}, is {now}")
    return lines


def installed_package() -> Path | None:
    """The folder of the vllm that this interpreter would import; nothing of it is imported."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _find_class(path: Path, name: str) -> ast.ClassDef:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"{path} has no class {name}")


def members_of(class_: ast.ClassDef) -> dict[str, str]:
    """Methods and attributes that a class's own source defines, and how they are called."""
    members: dict[str, str] = {}
    for node in class_.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            members[node.name] = _called(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members[node.target.id] = "attribute"
        elif isinstance(node, ast.Assign):
            members.update({t.id: "attribute" for t in node.targets if isinstance(t, ast.Name)})
    return members


def _called(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """ "classmethod (cls, vllm_config)": parameters by name, those with a default marked."""
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
        print("no vllm is installed; name its folder")
        return 2
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
