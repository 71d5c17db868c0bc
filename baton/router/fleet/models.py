"""The models that the engines serve: which engines fit together, and which names clients may use."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from baton.router.fleet.engine import Engine
from baton.router.fleet.policies import RoutedRequest
from baton.router.fleet.roster import Roster
from baton.router.fleet.shortlist import Pool
from baton.router.values.errors import RouterError
from baton.router.values.identity import Identity, Introduced, Kind, ModelCard, Seat, choose_model, weights_of
from baton.router.values.settings import Role

logger = logging.getLogger(__name__)


class FleetModels:
    def __init__(self, roster: Roster, aliases: Mapping[str, str]) -> None:
        self._roster = roster
        self._aliases = aliases
        self._pools: dict[tuple[Role, str | None], Pool[Engine]] = {}  # Pools by model; None: all models.
        self._names: set[str] | None = None  # Names that decode engines answer to; None: there may be more.
        self._models: set[str] = set()  # Models without adapters and other names of the same engines.
        self._adapters: set[str | None] = set()
        self._serves: dict[tuple[Kind, str], str | None] = {}  # Digests of models.
        self.on_updated: list[Callable[[Engine], None]] = []  # An engine has another identity now.

    def note_introduced(self, engine: Engine, found: Introduced | None) -> bool:
        """None: it answered that it cannot introduce itself now. True: its KV has another identity now."""
        engine.is_introduced = found is not None
        if found is None:
            return False
        before = engine.kv_identity
        engine.kind, engine.introduction = found.kind, found.introduction
        engine.max_model_len = found.max_model_len
        self.note_identity(engine, found.identity, found.cards)
        kv = engine.kv_identity
        if before is None or before == kv:
            return False
        change = f"weights {weights_of(before)} before, {weights_of(kv) if kv is not None else 'unknown'} now"
        logger.info("%s engine %s has another identity: %s", engine.role, engine.url, change)
        self._roster.note_event("updated", engine, change)
        for hear in self.on_updated:
            hear(engine)
        return True

    def note_identity(
        self, engine: Engine, identity: Identity | None, cards: tuple[ModelCard, ...] | None = None
    ) -> None:
        """What the engine serves. `cards`: of all names that it answers to; None: it does not report them."""
        if engine.identity == identity and engine.cards == cards:
            return
        engine.identity, engine.cards = identity, cards
        engine.lacks.clear()
        self.set_names(engine)
        self.judge()

    def set_names(self, engine: Engine) -> None:
        if engine.cards is not None:
            engine.names = tuple(card.id for card in engine.cards if card.id is not None)
        else:
            engine.names = None if engine.model is None else (engine.model,)

    def judge(self) -> None:
        """Refuse engines that do not fit the others.

        Of the engines of one kind and name, those with another architecture than most; engines of different
        kinds report different things. And prefill engines of a model that no decode engine serves. Weights
        may differ: an update is under way.
        """
        self._pools.clear()
        groups: dict[tuple[Kind, str], list[Seat]] = {}
        for engine in self._roster.engines:
            if (identity := engine.identity) is not None and identity.kv is not None:
                seat = Seat(identity.kv.model, engine.role == "decode")
                groups.setdefault((identity.kind, identity.name), []).append(seat)
        self._serves = {key: choose_model(seats, self._serves.get(key)) for key, seats in groups.items()}
        self._names = decoded = self._decoded_names()
        for engine in self._roster.engines:
            if (identity := engine.identity) is None:
                refused = None
            elif (kv := identity.kv) is not None and kv.model != (
                wanted := self._serves[identity.kind, identity.name]
            ):
                refused = f"serves {identity}, but the fleet serves {(wanted or '')[:12]}"
            elif engine.role == "prefill" and decoded is not None and decoded.isdisjoint(engine.names or ()):
                refused = f"serves {identity}, which no decode engine serves"
            else:
                refused = None
            if refused is not None and engine.refused is None:
                logger.error("%s engine %s is refused: it %s", engine.role, engine.url, refused)
                self._roster.note_event("refused", engine, refused)
            elif refused is None and engine.refused is not None:
                logger.info("%s engine %s is accepted: it serves %s", engine.role, engine.url, identity)
                self._roster.note_event("accepted", engine, f"serves {identity}")
            engine.refused = refused
        cards = [card for engine in self._roster.engines for card in engine.cards or ()]
        self._adapters = {card.id for card in cards if card.parent is not None}
        decoders = (engine for engine in self._roster.of("decode") if engine.refused is None)
        self._models = {engine.identity.name for engine in decoders if engine.identity is not None}

    def _decoded_names(self) -> set[str] | None:
        """What the decode engines answer to. None: one of them may answer to more."""
        names: set[str] = set()
        for engine in self._roster.of("decode"):
            if engine.names is None:
                return None
            names.update(engine.names)
        return names

    def check_model(self, request: RoutedRequest) -> None:
        """Raises RouterError if no decode engine serves the request's model, or it has to name one."""
        model = request.model
        if model is None or model == "":
            if len(self._models) > 1:
                models = ", ".join(sorted(self._models))
                raise RouterError(400, f"model: is needed here; one of {models}", param="model")
        elif self._names and (not isinstance(model, str) or model not in self._names):
            raise RouterError(
                404, f"the model {model!r} does not exist", param="model", code="model_not_found"
            )

    def may_take(self, engine: Engine, request: RoutedRequest) -> bool:
        names, model = engine.names, request.model
        has_model = names is None or model is None or model == "" or model in names
        return engine.is_eligible and has_model and (request.path is None or request.path not in engine.lacks)

    def pool_of(self, request: RoutedRequest) -> str:
        """Names the engines that serve the request's model. Empty: all of them, as far as is known."""
        if len(self._models) < 2:
            return ""
        serving = (one for one in self._roster.of("decode") if self.may_take(one, request))
        return next((one.identity.name for one in serving if one.identity is not None), "")

    def pool(self, role: Role, model: object) -> Pool[Engine]:
        name = model if isinstance(model, str) and model in (self._names or ()) else None
        if (pool := self._pools.get((role, name))) is None:
            serving = [one for one in self._roster.of(role) if name is None or name in (one.names or (name,))]
            pool = self._pools[role, name] = Pool(serving)
        return pool

    def adapter_of(self, request: RoutedRequest) -> str | None:
        """The adapter that the request names. None: it asks the model itself."""
        model = request.model
        return model if isinstance(model, str) and model in self._adapters else None

    def model_cards(self) -> Sequence[ModelCard] | None:
        """Cards for /v1/models. None: there is at most one model, and any decode engine knows its names."""
        decoders = [engine for engine in self._roster.of("decode") if engine.refused is None]
        cards: dict[str | None, ModelCard] = {
            card.id: card for engine in decoders for card in engine.cards or ()
        }
        if len(self._models) < 2 and (not self._aliases or not cards):
            return None
        for alias, model in self._aliases.items():
            if (named := cards.get(model)) is not None:
                cards[alias] = msgspec.structs.replace(named, id=alias)
        return list(cards.values())

    def updates(self) -> list[dict[str, Any]]:
        """Models of which engines have unlike weights, and how many engines have which, for operators."""
        counts: dict[str, Counter[str]] = {}
        for engine in self._roster.engines:
            if engine.is_up and engine.refused is None and engine.identity is not None and engine.weights:
                counts.setdefault(engine.identity.name, Counter())[engine.weights] += 1
        return [
            {"model": name, "weights": dict(weights)} for name, weights in counts.items() if len(weights) > 1
        ]
