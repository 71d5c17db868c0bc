"""Single names and numbers that users, supervisors, other engines and files depend on, in one text."""

import json
import re
import tomllib
from inspect import signature
from typing import Any, get_args

import msgspec
import numpy as np

from baton.cli import route, serve_settings, settings, with_parent
from baton.connectors.extra_config import NIXL
from baton.connectors.multi.children import KEY as MULTI_KEY
from baton.connectors.registry import BUILT_IN, ENTRY_POINT_GROUP
from baton.connectors.storage.stores.settings import CHUNK_TOKENS
from baton.contract.factory import DEFAULT_FACTORY
from baton.core.errors import UserError
from baton.core.layout import PLANES, SLOT
from baton.core.transfer_params import CACHED_TOKENS, FIELD, OFFLOAD_CHOICES
from baton.engine.core.client import EngineDeadError, EngineUnreadyError
from baton.engine.process import child
from baton.engine.runner.sampler import seed_of, uniforms
from baton.hosts.vllm import CONNECTORS
from baton.http.errors import TYPES
from baton.http.workers import WorkerFailed
from baton.protocol import handshake, introduction, messages, ticket
from baton.router.fleet.loans import Outcome as LoanOutcome
from baton.router.processes import run as route_run
from baton.router.values.errors import RouterError
from baton.server import run as serve_run
from baton.server.errors import describe
from baton.server.transfer_ask import FIRST_TOKEN, GIVEN, NAMES_TOKENS
from baton.transport.cuda_ipc import transport as cuda_ipc
from baton.transport.nixl import transport as nixl
from baton.transport.registry import PREFERENCE
from baton.transport.tcp import wire as tcp_wire
from tests.golden.golden import ROOT, check_values, literals, source

FRONTS = ("baton/http", "baton/router", "baton/server")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROUTER_ERRORS = {
    "user": RouterError.of_user(UserError("message", field="field")),
    "gateway": RouterError.gateway("message"),
    "unavailable": RouterError.unavailable("message"),
    "too late": RouterError.too_late("message"),
}
ERRORS = {
    "user": UserError("m"),
    "dead engine": EngineDeadError("m"),
    "unready engine": EngineUnreadyError("m"),
    "failed worker": WorkerFailed("m"),
    "bug": ValueError("m"),
}


def written(pattern: str, *folders: str) -> str:
    """What the pattern finds in the code there, each once."""
    return " ".join(sorted(set(re.findall(pattern, source(*folders)))))


def quoted(pattern: str, *folders: str) -> str:
    """Literals there that the pattern matches as a whole."""
    return ", ".join(sorted({text for text in literals(*folders) if re.fullmatch(pattern, text)}))


def test_project_and_connectors() -> None:
    """vLLM's users choose plug-ins by name (VLLM_PLUGINS). vLLM has a MultiConnector of its own."""
    check_values(
        "constants_of_the_project",
        {
            "name": PROJECT["name"],
            "extras": " ".join(sorted(PROJECT["optional-dependencies"])),
            **{f"script {name}": value for name, value in PROJECT["scripts"].items()},
            **{
                f"{group}, {name}": value
                for group, entries in PROJECT["entry-points"].items()
                for name, value in sorted(entries.items())
            },
            "group of connectors": ENTRY_POINT_GROUP,
            "connectors": " ".join(sorted(BUILT_IN)),
            "connectors in vLLM": " ".join(sorted(CONNECTORS)),
            "factory of an engine": DEFAULT_FACTORY,
        },
    )
    assert PROJECT["entry-points"][ENTRY_POINT_GROUP] == BUILT_IN


def test_settings_and_processes() -> None:
    """What users, supervisors, `ps` and a shell see. `names` has the names of threads and processes too."""
    from_environment = r'\b(?:environ|environment|env)(?:\.get\(|\[)"([A-Z_]+)"(?!\] =)'
    check_values(
        "constants_of_settings",
        {
            "variables that are read": written(from_environment, "baton", "lab"),
            "prefix of the settings of serve": serve_settings.COMMAND.prefix,
            "other prefixes": " ".join(serve_settings.COMMAND.other_prefixes),
            "other variables": " ".join(sorted(serve_settings.COMMAND.others)),
            "prefix of the settings of route": route.COMMAND.prefix,
            "its other variables": " ".join(sorted(route.COMMAND.others)),
            "table of route": " ".join(route.COMMAND.sections),
            "options that its file cannot have": " ".join(
                name for name in signature(route.route).parameters if name not in route.COMMAND.settings
            ),
            "options of sim": written(r'add_argument\(\s*"([\w-]+)"', "lab/sim"),
            "key of BatonMultiConnector": MULTI_KEY,
            "default of chunk_tokens, by which engines find each other's files": CHUNK_TOKENS,
            "options of vLLM's NixlConnector that are refused with a replacement": " ".join(sorted(NIXL)),
            "exit of serve: stopped": serve_run.EXIT_STOPPED,
            "exit of serve: the engine died": serve_run.EXIT_ENGINE_DIED,
            "exit of serve: bad configuration": settings.EXIT_BAD_CONFIG,
            "exit of route: stopped": route_run.EXIT_STOPPED,
            "exit of route: not started": route_run.EXIT_NOT_STARTED,
            "exit of a child without its parent": child.PARENT_GONE,
            "exit of a command without its parent": with_parent.PARENT_IS_GONE,
            "processes": quoted(r"baton-(core|rank-\{\}|worker)", "baton/engine", "baton/http"),
            "temporary folders": quoted(r"baton-\w+-", "baton"),
        },
    )
    assert not {serve_settings.COMMAND.variable(name) for name in serve_settings.COMMAND.settings} & (
        serve_settings.COMMAND.others
    )


def test_http() -> None:
    """Errors, headers and words. `http_bodies`, `http_paths` and `http_states` have the rest."""
    described = {name: describe(error) for name, error in ERRORS.items()}
    check_values(
        "constants_of_http",
        {
            **{f"type of {status}": kind for status, kind in TYPES.items()},
            **{f"router's, {name}": f"{error.status} {error.kind}" for name, error in ROUTER_ERRORS.items()},
            "router's, user, body": msgspec.json.encode(ROUTER_ERRORS["user"].body()).decode(),
            **{
                f"engine's, {name}": f"{status} {body.type} {json.dumps(body.code)}"
                for name, (status, body) in described.items()
            },
            "codes": written(r'\bcode="(\w+)"', *FRONTS),
            "headers": quoted(r"[Xx]-[A-Za-z-]+", *FRONTS).lower(),
            "value of x-baton-prompt": quoted(r"total=\{\}.*", *FRONTS),
            "health of the router": written(r'\{"status": "(\w+)"', "baton/router"),
            "router's labels": written(
                r'(?:\.of\("\w+", |\bcount\("\w+", |\bcount_first\(|_push\()"(\w+)"', "baton/router"
            ),
            "outcomes of loan returns": " ".join(get_args(LoanOutcome)),
        },
    )


def test_engines() -> None:
    """What other engines and clients of them read. A seed and a position give one number in every release."""
    drawn = uniforms(np.array([1, 2**63], dtype=np.uint64), np.array([0, 5]))
    check_values(
        "constants_of_engines",
        {
            "version of the wire": messages.WIRE_VERSION,
            "version of the protocol": handshake.PROTOCOL_VERSION,
            "version of tickets": ticket.TICKET_VERSION,
            "version of introductions": introduction.INTRODUCTION_VERSION,
            "version of tcp": tcp_wire.VERSION,
            "version of cuda_ipc": cuda_ipc.VERSION,
            "version of nixl": nixl.VERSION,
            "transports": " ".join(PREFERENCE),
            "packings": f"{SLOT} {PLANES}",
            "packings in vLLM": quoted(r"vllm .*\{\}.*", "baton/hosts/vllm"),
            "params": FIELD,
            "offload": " ".join(OFFLOAD_CHOICES),
            "cached tokens": CACHED_TOKENS,
            "first token": FIRST_TOKEN,
            "tokens of an answer": f"{GIVEN} {NAMES_TOKENS}",
            "drawn seed": seed_of(7, "request", 0),
            "draws": drawn.tolist(),
        },
    )


def test_no_name_of_a_process_is_cut() -> None:
    names = quoted(r"baton-(core|rank-\{\}|worker)", "baton/engine", "baton/http").split(", ")
    assert all(len(name.replace("{}", "000")) <= 15 for name in names), "by Linux"
