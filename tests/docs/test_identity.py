"""`docs/identity.md` contains tables of what the code compares, and of what it leaves out and why.

With WRITE_GOLDEN=1 the test rewrites the tables.
"""

import ast
import inspect
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from baton.core.identity import KVIdentity
from baton.hosts.vllm.host_fields import COMPARED, EXCLUDED, LENGTH_IS_A_LIMIT, NEUTRAL, ROPES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "identity.md"
BEGIN = "## Tables of the code"
END = "## Migration"


def test_the_page_shows_the_tables_of_the_code() -> None:
    text, found = PAGE.read_text(), tables()
    begin, end = text.index(BEGIN), text.index(END)
    if os.environ.get("WRITE_GOLDEN"):
        PAGE.write_text(text[:begin] + found + text[end:])
    assert PAGE.read_text()[begin:].startswith(found), "run this test with WRITE_GOLDEN=1"


def tables() -> str:
    return "\n".join(
        [
            BEGIN,
            "",
            "A test compares this section with the code.",
            "",
            "### Compared: the fields of `KVIdentity`",
            "",
            *_table("field | meaning", _fields()),
            "",
            "### Compared: inputs of vLLM's requests",
            "",
            "A request with an input that is in neither table cannot be named.",
            "",
            *_table("named", [[_code(sorted(_inputs("NAMED_INPUTS")))]]),
            "",
            *_table(
                "left out | why", ([_code([name]), why] for name, why in _inputs("OTHER_INPUTS").items())
            ),
            "",
            "### Left out: fields of vLLM's configuration",
            "",
            f"{len(EXCLUDED)} fields are left out. Every other field is in the identity's `host`,",
            "also one that a new vLLM adds.",
            "",
            *_table("why | fields", _grouped(EXCLUDED)),
            "",
            "### Left out with some values: fields of vLLM's configuration",
            "",
            "With these values vLLM computes what the embedded engine computes. With another",
            "value the field is compared.",
            "",
            *_table("why | values | fields", _neutral()),
            "",
            "No layer reads the length if all rotary embeddings are of the kinds",
            f"{_code(sorted(ROPES))},",
            f"and the model is one of {_code(sorted(LENGTH_IS_A_LIMIT))}.",
            "",
            "### Compared, and known to Baton: fields of vLLM's configuration",
            "",
            *_table("why | fields", _grouped(COMPARED)),
            "",
            "",
        ]
    )


def _table(head: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {head} |"
    yield "|" + "---|" * (head.count("|") + 1)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _fields() -> Iterator[list[str]]:
    """The comment after a field, or before it."""
    before: list[str] = []
    for line in inspect.getsource(KVIdentity).splitlines():
        if found := re.match(r" {4}(\w+): \w+(?: = \S+)?(?:  # (.*))?$", line):
            yield [_code([found[1]]), found[2] or " ".join(before)]
        comment = re.match(r" {4}# (.*)", line)
        before = [*before, comment[1]] if comment else []


def _inputs(name: str) -> dict[str, str]:
    """A table of `hosts/vllm/requests.py`, which cannot be imported without vLLM."""
    tree = ast.parse((ROOT / "baton/hosts/vllm/requests.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name
    )
    if isinstance(value, ast.Call):
        return dict.fromkeys(ast.literal_eval(value.args[0]), "")
    assert value is not None
    return dict(ast.literal_eval(value))


def _grouped(reasons: dict[str, str]) -> Iterator[list[str]]:
    names = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(name)
    for reason, group in names.items():
        yield [reason, _by_section(group)]


def _neutral() -> Iterator[list[str]]:
    names = defaultdict(list)
    for name, row in NEUTRAL.items():
        names[row].append(name)
    for row, group in names.items():
        rule = [f"if {row.when}"] if row.when else []
        yield [row.reason, ", ".join([_code(row.values), *rule] if row.values else rule), _by_section(group)]


def _by_section(names: Iterable[str]) -> str:
    sections = defaultdict(list)
    for name in names:
        section, _, field = name.partition(".")
        sections[section].append(field)
    return "; ".join(f"{section}: {_code(fields)}" for section, fields in sorted(sections.items()))
