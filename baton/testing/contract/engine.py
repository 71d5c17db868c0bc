"""One engine as the kit drives it: the real scheduler, a watched connector, and an executor.

    ask / abort --> | schedule -> ranks execute -> update | --> answers, checked token by token

With several steps in flight, ranks run the next step before the scheduler gets the result of the one before.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from baton.core.config import EngineConfig
from baton.engine.api import EngineOutput, EngineRequest, SamplingParams
from baton.engine.executor import Executor
from baton.engine.step import ModelRunnerOutput, SchedulerOutput
from baton.testing.contract.arithmetic import states_of
from baton.testing.contract.leaks import IDS_MIN, keys_reachable_from
from baton.testing.contract.ledger import Ledger
from baton.testing.contract.ranks import KitRanks
from baton.testing.contract.story import Story, why
from baton.testing.contract.watched_scheduler import WatchedScheduler, watch_scheduler
from baton.testing.contract.watched_worker import read_final_notes
from baton.testing.host.engine import Answer, Engine

MakeHalf = Callable[[EngineConfig], Any]
MakeExecutor = Callable[[EngineConfig, Ledger, dict[str, str | None]], Executor]
Expect = Callable[[Sequence[int], str | None, int], list[int]]
"""(prompt, salt, number of tokens) -> the tokens that an engine without a connector generates."""


class KitEngine(Engine):
    def __init__(
        self,
        config: EngineConfig,
        story: Story,
        *,
        make_half: MakeHalf,
        make_executor: MakeExecutor,
        expect: Expect,
        name: str = "engine",
        checks_tokens: bool = True,
        final_notes: str | None = None,
    ) -> None:
        """Start the executor and the scheduler half. If a constructor raises, everything is shut down again.

        `final_notes`: an empty folder for the final notes of ranks in processes of their own.
        """
        self.name = name
        self.checks_tokens = checks_tokens
        self.story = story
        self.woken = threading.Event()
        self.ledger = Ledger(story, config.parallel_config.tensor_parallel_size)
        self.num_idle_steps = 0  # Idle steps in a row; an idle step computes, delivers and frees nothing.
        self.num_preempted = 0
        # Prompts that the params of requests were made for, if they are not their own.
        self._made_for: dict[str, list[int]] = {}
        self._expect = expect
        self._final_notes = final_notes
        salts: dict[str, str | None] = {}
        self.executor = make_executor(config, self.ledger, salts)
        try:
            self.half: WatchedScheduler = watch_scheduler(
                make_half(config),
                self.ledger,
                name=name,
                block_size=config.cache_config.block_size,
                groups=config.kv_cache_groups,
                final_notes=final_notes,
            )
        except BaseException:
            self.executor.shutdown()
            raise
        self.half.makes_up_kv = not checks_tokens
        try:
            super().__init__(config, self.half, salts, depth=config.parallel_config.max_concurrent_batches)
            self.executor.connect(self.half, has_steps_in_flight=self.depth > 1)
            self.half.bind_wake(self.woken.set)
            self.executor.bind_wake(self.woken.set)
        except BaseException:
            self.half.shutdown()
            self.executor.shutdown()
            raise

    # --- Requests ----------------------------------------------------------------------------------

    def ask(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        made_for: Sequence[int] = (),
    ) -> None:
        asked = EngineRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            arrival_time_s=0.0,
            cache_salt=salt,
            kv_transfer_params=params,
        )
        options = f", salt {salt!r}" if salt is not None else ""
        options += f", params {sorted(params)}" if params else ""
        self.story.record_line(
            f"{self.name}: request {request_id}, prompt {list(prompt)}, {max_tokens} tokens{options}"
        )
        self._made_for[request_id] = list(made_for)
        self.add_request(asked)

    def abort(self, request_id: str) -> None:
        self.story.record_line(f"{self.name}: request {request_id} is aborted")
        self.scheduler.abort([request_id])

    @property
    def open_ids(self) -> list[str]:
        return sorted(request_id for request_id, answer in self.answers.items() if answer.last is None)

    def reset_cache(self) -> None:
        """Reset the engine's and the connector's cache; refused while blocks are held."""
        done = self.scheduler.reset_prefix_cache(reset_connector=True)
        self.story.record_line(f"{self.name}: reset of all caches, {'done' if done else 'refused'}")

    def change_weights(self, version: str | None) -> None:
        """Change the weights between two steps; open requests go on. The kit's KV does not depend on them."""
        while self.in_flight:
            self._take_oldest()
        answer = self.half.set_weights(None, version)
        guaranteed = "" if answer is True else ", without a guarantee"
        self.story.record_line(f"{self.name}: other weights, {version or 'without a name'}{guaranteed}")
        self.story.seen[f"updates of weights{guaranteed}"] += 1
        self.forget_local_cache()

    def forget_local_cache(self) -> None:
        self.scheduler.reset_prefix_cache(reset_connector=False)

    def sleep(self) -> None:
        """Sleep and wake up, as vLLM's `EngineCore.sleep`, after a reset of all caches. While a block is held
        the reset is refused.
        """
        if not isinstance(self.executor, KitRanks):
            return
        is_free = not self.in_flight and self.scheduler.reset_prefix_cache(reset_connector=True)
        self.story.record_line(f"{self.name}: {'sleeps, and wakes up' if is_free else 'may not sleep'}")
        if is_free:
            self.story.seen["sleeps"] += 1
            self.executor.sleep()

    def dummy_run(self) -> None:
        """Do a warm-up run. Layer hooks are called only if the connector declares them graph-capturable."""
        if isinstance(self.executor, KitRanks):
            shows_hooks = all(worker.graph_capturable for worker in self.executor.workers)
            metadata = self.half.build_dummy_meta(SchedulerOutput()) if shows_hooks else None
            for notes in self.executor.dummy_run(metadata, shows_hooks=shows_hooks):
                self.ledger.take_notes(self.name, notes)

    # --- Steps -------------------------------------------------------------------------------------

    def move(self) -> bool:
        """Schedule a step and take the oldest step's result. True if anything was computed, delivered or
        freed.

        If more steps may be in flight and there are requests, no result is taken.
        """
        computes = False
        if not self.in_flight or self.scheduler.has_requests():
            computes = bool(self.schedule().num_scheduled_tokens)
            self.story.seen["steps after one in flight"] += len(self.in_flight) > 1
        if len(self.in_flight) < self.depth and self.scheduler.has_requests():
            return computes
        return self._take_oldest() or computes

    def begin(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self._tell_step(output)
        return self.executor.submit(output)

    def finish(self, output: SchedulerOutput, begun: Future[ModelRunnerOutput]) -> ModelRunnerOutput:
        return begun.result()

    def _take_oldest(self) -> bool:
        num_ended = self.scheduler.num_ended_transfers
        output, _ = self.in_flight[0]
        outputs = self.finish_oldest().outputs
        self.executor.forget_all_but(self.scheduler.requests)
        has_moved = bool(
            output.num_scheduled_tokens or outputs or self.scheduler.num_ended_transfers != num_ended
        )
        self.num_idle_steps = 0 if has_moved else self.num_idle_steps + 1
        return has_moved

    def _tell_step(self, output: SchedulerOutput) -> None:
        self.num_preempted += len(output.preempted_req_ids)
        self.story.seen["preemptions"] += len(output.preempted_req_ids)
        self.story.seen["steps" if output.num_scheduled_tokens else "steps without tokens"] += 1
        num_tokens_by_request = [
            f"{request_id} {count}" for request_id, count in output.num_scheduled_tokens.items()
        ]
        parts = [f"computes {', '.join(num_tokens_by_request)}"] if num_tokens_by_request else []
        if output.preempted_req_ids:
            parts.append(f"preempts {', '.join(sorted(output.preempted_req_ids))}")
        if output.finished_req_ids:
            parts.append(f"finished {', '.join(sorted(output.finished_req_ids))}")
        if parts:
            self.story.record_line(f"{self.name}: step {'; '.join(parts)}")
        elif self.num_idle_steps == 0:
            self.story.record_line(f"{self.name}: step without tokens")

    def take(self, output: EngineOutput) -> None:
        super().take(output)
        self._check_tokens(self.answers[output.request_id])
        if output.finish_reason is None:
            return
        error = f" ({output.error.message})" if output.error is not None else ""
        self.story.record_line(f"{self.name}: {output.request_id} ends, {output.finish_reason}{error}")

    def _check_tokens(self, answer: Answer) -> None:
        asked, given = answer.asked, answer.token_ids
        if self.story.breach is not None or not given or not self.checks_tokens:
            return
        made_for = self._made_for[asked.request_id]
        right = self._expect(asked.prompt_token_ids, asked.cache_salt, len(given))
        wrongs = self.executor.wrongs if isinstance(self.executor, KitRanks) else None
        if given == right:
            self._count_rules_kept(made_for, sees_bytes=wrongs is not None)
            return
        rule = "params-believed" if made_for else "wrong-token"
        why = f"{asked.request_id} answers {given}; without a connector the answer is {right}"
        wrong = wrongs.get(asked.request_id) if wrongs is not None else None
        if wrong is not None:
            foreign = states_of(made_for, asked.cache_salt)
            rule, why = wrong.rule(foreign, is_store_broken=self.ledger.num_store_faults > 0), str(wrong)
        self.story.check(rule, False, why)

    def _count_rules_kept(self, made_for: list[int], *, sees_bytes: bool) -> None:
        checked = self.story.checked
        checked["wrong-token"] += 1
        checked["params-believed"] += bool(made_for)
        checked["wrong-bytes"] += sees_bytes
        checked["salt-ignored"] += sees_bytes and len({*self._salts.values()}) > 1
        checked["lost-on-preemption"] += sees_bytes and self.num_preempted > 0
        checked["failed-load-unreported"] += sees_bytes and self.ledger.num_faults > 0

    # --- At rest -----------------------------------------------------------------------------------

    def collect_notes(self) -> None:
        """Take what the ranks have noted since their last report, if they run in this process."""
        if isinstance(self.executor, KitRanks):
            self.executor.check_memory("at rest")
            for worker in self.executor.workers:
                self.ledger.take_notes(self.name, worker.take_notes())

    def check_ids(self) -> None:
        """Check that no dict or set of the connector still names ended requests.

        A cache of the latest few requests is allowed: at most half of the ids may be left.
        """
        ended = {request_id for request_id in self.answers if request_id in self.ledger.ended}
        if len(ended) < IDS_MIN:
            return
        halves = [("", self.half.inner)]
        halves += [(f" of rank {w.rank}", w.inner) for w in getattr(self.executor, "workers", ())]
        for place, half in halves:
            left = sorted(keys_reachable_from(half) & ended)
            self.story.check(
                "ids-left",
                2 * len(left) <= len(ended),
                f"{type(half).__name__}{place} still remembers {left}, which have ended",
            )

    @property
    def num_free_slots(self) -> int:
        """Tokens that a new request can have without a preemption."""
        cache = self.scheduler.kv_cache
        return cache.block_pool.num_free_blocks // len(cache.groups) * cache.block_size

    @property
    def holds_blocks(self) -> bool:
        """Return whether a request holds blocks, or a connector that references blocks itself."""
        return self.scheduler.kv_cache.usage > 0.0

    def shutdown(self) -> None:
        """Shut down twice, because hosts may do so."""
        story = self.story
        for number in ("", " a second time"):
            for part, shutdown in (
                (self.name, self.half.shutdown),
                (f"{self.name}'s ranks", self.executor.shutdown),
            ):
                try:
                    shutdown()
                except Exception as error:  # The connector's error; the other part is shut down all the same.
                    detail = f"shutdown of {part}{number} raised {why(error)}"
                    story.check("shutdown-raised", False, detail)
                story.check("shutdown-raised", True)
        self._take_final_notes()

    def _take_final_notes(self) -> None:
        folder, self._final_notes = self._final_notes, None
        if folder is None:
            return
        for rank, notes in enumerate(
            read_final_notes(folder, self.config.parallel_config.tensor_parallel_size)
        ):
            if notes is not None:
                self.ledger.take_notes(self.name, notes)
            else:
                detail = f"rank {rank} of {self.name} ended before its half's shutdown had returned"
                self.story.check("shutdown-raised", False, detail)
