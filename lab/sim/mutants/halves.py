"""Methods that override those of a scheduler half, so that it lacks one guard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from baton.connectors.multi import MultiSchedulerHalf
from baton.connectors.storage.memory.metadata import OffloadMetadata, OffloadReport
from baton.connectors.storage.memory.scheduler import OffloadSchedulerHalf
from baton.connectors.pull.metadata import FailedLoad, Order, PullMetadata, PullWorkerReport, ReadBlocks
from baton.connectors.pull.scheduler import PullSchedulerHalf
from baton.contract import KVConnectorOutput
from baton.core.hashing import root_hash
from baton.core.kv_groups import NULL_BLOCK_ID

if TYPE_CHECKING:
    Half: TypeAlias = PullSchedulerHalf
    OffloadHalf: TypeAlias = OffloadSchedulerHalf
    MultiHalf: TypeAlias = MultiSchedulerHalf
else:
    Half = OffloadHalf = MultiHalf = object  # A world combines them with the real half.


class LendsNothing(Half):
    """P signs a ticket and lets the blocks go. A Multi does so although a child lends them."""

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, super().request_finished_all_groups(request, block_ids)[1]

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        connector_output.finished_sending = None


class _WithPrompt:
    """A request with another prompt."""

    def __init__(self, request: Any, prompt_token_ids: Sequence[int]) -> None:
        self._request = request
        self.prompt_token_ids = prompt_token_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class IgnoresPrompt(Half):
    """D takes a ticket for any prompt that is long enough."""

    prompts: ClassVar[dict[str, list[int]]] = {}  # Lent prompts, by ticket.

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_lent, params = super().request_finished_all_groups(request, block_ids)
        if params is not None:
            self.prompts[params["baton_ticket"]] = list(request.all_token_ids)
        return is_lent, params

    def on_new_request(self, request: Any) -> None:
        lent = self.prompts.get((request.kv_transfer_params or {}).get("baton_ticket", ""), [])
        own = request.prompt_token_ids
        super().on_new_request(_WithPrompt(request, [*lent[: len(own)], *own[len(lent) :]]))


class AnnouncesEarly(Half):
    """P announces tokens when they are scheduled, not when they are computed."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, PullMetadata)
        if metadata.step:
            ranks = range(1, self._identity.num_ranks)
            others = tuple(PullWorkerReport(rank=rank, step=metadata.step) for rank in ranks)
            report = PullWorkerReport(rank=0, step=metadata.step, others=others)
            self.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        return metadata


class _ChangesOrders(Half):
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, PullMetadata)
        return replace(metadata, orders=tuple(self.changed(metadata.orders)))

    def changed(self, orders: Iterable[Order]) -> Iterable[Order]:
        raise NotImplementedError


class ForgetsMissing(_ChangesOrders):
    """A failed load is reported as received, its blocks not as invalid."""

    def changed(self, orders: Iterable[Order]) -> Iterable[Order]:
        return [replace(order, block_ids=()) if isinstance(order, FailedLoad) else order for order in orders]


class MissesLayer(_ChangesOrders):
    """D does not read the tokens of the last layer."""

    def changed(self, orders: Iterable[Order]) -> Iterable[Order]:
        num_layers = self._identity.kv_identity.num_layers
        for order in orders:
            if isinstance(order, ReadBlocks):
                first, last = order.layers or (0, num_layers)
                order = replace(order, layers=(first, min(last, num_layers - 1)))
            yield order


class ReadsNextGroup(_ChangesOrders):
    """D reads each cache group from the blocks of the next one."""

    side = "remote"

    def changed(self, orders: Iterable[Order]) -> Iterable[Order]:
        """Each read of a claim gets the table of the claim's next group."""
        orders = list(orders)
        tables: dict[int, dict[int, Any]] = {}  # Block tables by claim and group.
        for order in orders:
            if isinstance(order, ReadBlocks) and order.groups is not None:
                of_claim = tables.setdefault(order.claim, {})
                of_claim[getattr(order.groups, self.side)] = getattr(order, f"{self.side}_blocks")
        for order in orders:
            if isinstance(order, ReadBlocks) and order.groups is not None:
                groups = sorted(tables[order.claim])
                following = groups[(groups.index(getattr(order.groups, self.side)) + 1) % len(groups)]
                yield replace(order, **{f"{self.side}_blocks": tables[order.claim][following]})
            else:
                yield order


class WritesNextGroup(ReadsNextGroup):
    """D reads each cache group into the blocks of the next one."""

    side = "local"


class ReadsFromFront(_ChangesOrders):
    """D takes the first block that is lent of a window for that of token 0."""

    def changed(self, orders: Iterable[Order]) -> Iterable[Order]:
        for order in orders:
            if isinstance(order, ReadBlocks) and order.groups is not None:
                held = tuple(block for block in order.remote_blocks if block != NULL_BLOCK_ID)
                missing = len(order.remote_blocks) - len(held)
                yield replace(order, remote_blocks=held + held[-1:] * missing)
            else:
                yield order


# --- Offload and Multi ----------------------------------------------------------------------------


class StoresUnfenced(OffloadHalf):
    """A step does not wait for stores whose blocks it may overwrite."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, OffloadMetadata)
        return replace(metadata, fence=())


class FindsFailedStores(OffloadHalf):
    """A store that failed can be found."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, OffloadReport):
            for of_rank in (report, *report.others):
                of_rank.failed_stores = None
        super().update_connector_output(connector_output)


class FindsNoStates(OffloadHalf):
    """A load may end with a chunk whose state is not stored."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._state_groups = set()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class StoresAnyState(OffloadHalf):
    """Takes the state after a step for that at the end of the last full block, by its place in the table."""

    def _plan_store(self, prompt: Any, num_computed: int, end: int, states: Any) -> Any:
        size = self._identity.block_tokens
        last = end // size
        of_groups = {index: prompt.tables[index][last - 1] for index in self._state_groups if last}
        return super()._plan_store(prompt, num_computed, end, {last * size: of_groups})


class NamesNoWeights(OffloadHalf):
    """The name of a chunk is the same for all weights."""

    def _new_prompt(self, request: Any, extra: bytes) -> Any:
        prompt = super()._new_prompt(request, extra)
        prompt.root = root_hash("any weights")
        return prompt


class TellsNoLoader(MultiHalf):
    """The child whose tokens were promised is not told where they go."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, 0)
