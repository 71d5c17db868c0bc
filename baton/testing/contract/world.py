"""World of one example: one engine, or a pair P and D, with every operation that an example can do.

At the end everything is brought to rest, and whatever is still open is reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.transfer_params import CONTINUE
from baton.testing.contract.case import BESIDE, INLINE, LATENT, STATE, Shape
from baton.testing.contract.engine import KitEngine
from baton.testing.contract.leaks import new_threads, running_threads
from baton.testing.contract.ranks import KitRanks
from baton.testing.contract.site import ToySite
from baton.testing.contract.story import Story

PROBE = "probe"
PROBE_PROMPT = (1, 2, 3)
PROBE_STEPS = 40
NO_WINDOWS = f"{STATE}: a state, {LATENT}: latents, {INLINE}: scales inline, {BESIDE}: beside"
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
REMOTE_PREFILL = {"do_remote_decode": False, "do_remote_prefill": True}


@dataclass(slots=True)
class Handoff:
    """A request whose prompt P computes and whose answer D generates."""

    number: int
    prompt: list[int]
    max_tokens: int
    salt: str | None
    params: dict[str, Any] | None = None  # The params of P's answer.
    is_over: bool = False  # D has been asked, or never will be.


class World:
    def __init__(self, site: ToySite, shape: Shape, story: Story) -> None:
        self.site = site
        self.shape = shape
        self.story = story
        self._mark = site.new_mark()
        self._num_asked = self._num_updates = 0
        self._prompts: list[tuple[list[int], str | None]] = []  # Prompts asked so far, with their salts.
        self._handoffs: list[Handoff] = []
        self._threads = running_threads()
        story.record_line(
            f"engine with {shape.tp} rank(s), {shape.num_blocks} blocks, {shape.budget} tokens a step, "
            f"prefix cache {'on' if shape.caching else 'off'}, on failed loads: {shape.policy}"
            + (f", layers that see {shape.windows} tokens ({NO_WINDOWS})" if shape.windows else "")
            + (f", {shape.in_flight} steps in flight" if shape.in_flight > 1 else "")
        )
        story.seen["engines with latents and index keys"] += LATENT in shape.windows
        story.seen["engines with scales inline"] += INLINE in shape.windows
        story.seen["engines with scales beside"] += BESIDE in shape.windows
        story.seen["engines with several KV-cache groups"] += len(set(shape.windows)) > 1
        story.seen["engines with recurrent states"] += STATE in shape.windows
        self.pairing = site.case.pairing
        self.engines: list[KitEngine] = []
        if self.pairing == "none":
            self.engines.append(site.start(shape, story, name="engine", role="kv_both"))
        else:
            self.engines.append(site.start(shape, story, name="P", role="kv_producer"))
            try:
                self.engines.append(site.start(shape, story, name="D", role="kv_consumer"))
            except BaseException:
                self.engines[0].shutdown()
                raise

    @property
    def last(self) -> KitEngine:
        """The engine that answers clients: the only one, or D."""
        return self.engines[-1]

    def _marked(self, prompt: Sequence[int]) -> list[int]:
        return [self._mark, *prompt[1:]]

    # --- Operations --------------------------------------------------------------------------------

    def dummy_run(self) -> None:
        """Do what hosts do before the first step, as far as connectors see it."""
        for engine in self.engines:
            engine.dummy_run()

    def ask(self, prompt: Sequence[int], max_tokens: int, salt: str | None) -> None:
        """Send a client's request; with a pair, to P and then to D."""
        prompt = self._marked(prompt)
        self._num_asked += 1
        number = self._num_asked
        self._prompts.append((prompt, salt))
        if self.pairing == "none":
            self.last.ask(f"r{number}", prompt, max_tokens=max_tokens, salt=salt)
            return
        handoff = Handoff(number, prompt, max_tokens, salt)
        self._handoffs.append(handoff)
        transfer_id = f"t{number}"
        producer = self.engines[0]
        params: dict[str, Any] = {**REMOTE_DECODE, "transfer_id": transfer_id}
        # A state is handed over after all tokens, with P's first token, or after all but one.
        continues = {CONTINUE: True} if STATE in self.shape.windows and number % 2 else {}
        params |= continues
        producer.ask(f"p{number}", prompt, max_tokens=1, salt=salt, params=params)
        if self.pairing == "push":
            known = {"remote_engine_id": producer.name, "baton_introduction": producer.half.introduction()}
            self._ask_decode(handoff, {**REMOTE_PREFILL, "transfer_id": transfer_id, **known, **continues})

    def ask_again(self, index: int, max_tokens: int) -> None:
        """Repeat an earlier request after the engines' caches were reset; the connector may still have its
        KV.
        """
        if self._prompts:
            prompt, salt = self._prompts[index % len(self._prompts)]
            self.forget_local_caches()
            self.ask(prompt, max_tokens, salt)

    def ask_all(self, several: Sequence[Sequence[int]], max_tokens: int) -> None:
        for prompt in several:
            self.ask(prompt, max_tokens, None)

    def ask_to_store(self, prompt: Sequence[int], salt: str | None) -> None:
        """Run to the end and reset the engine's cache, so that only the connector holds the KV."""
        self.ask(prompt, 1, salt)
        self.settle()
        self.forget_local_caches()

    def ask_plain(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Ask only the last engine, without params."""
        self._num_asked += 1
        self.last.ask(f"r{self._num_asked}", self._marked(prompt), max_tokens=max_tokens)

    def replay(self, index: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Send params that P gave for one prompt with another prompt, or again with the same."""
        handoffs = [handoff for handoff in self._handoffs if handoff.params is not None]
        if not handoffs:
            return
        handoff = handoffs[index % len(handoffs)]
        prompt = self._marked(prompt)
        self._num_asked += 1
        self.last.ask(
            f"d{self._num_asked}",
            prompt,
            max_tokens=max_tokens,
            salt=handoff.salt,
            params=dict(handoff.params or {}),
            made_for=handoff.prompt if prompt != handoff.prompt else (),
        )

    def lose_ticket(self, index: int) -> None:
        """Drop P's answer, so that D is never asked."""
        handoffs = [handoff for handoff in self._handoffs if not handoff.is_over]
        if handoffs:
            handoff = handoffs[index % len(handoffs)]
            self.story.record_line(f"D is never asked for p{handoff.number}")
            handoff.is_over = True

    def abort(self, index: int) -> None:
        open_ids = [(engine, request_id) for engine in self.engines for request_id in engine.open_ids]
        if open_ids:
            engine, request_id = open_ids[index % len(open_ids)]
            engine.abort(request_id)

    def ask_and_abort(self, prompt: Sequence[int], max_tokens: int, num_steps: int) -> None:
        """Abort a request while it waits, loads, computes, or has just ended."""
        before = {(engine.name, request_id) for engine in self.engines for request_id in engine.answers}
        self.ask(prompt, max_tokens, None)
        for _ in range(num_steps):
            self.step()
        for engine in self.engines:
            for request_id in engine.open_ids:
                if (engine.name, request_id) not in before:
                    engine.abort(request_id)

    def break_store(self) -> None:
        if self.site.case.break_store is not None:
            self.story.record_line("what the connector has stored is broken")
            for engine in self.engines:
                engine.ledger.note_store_fault()
            self.site.case.break_store()

    def fail_a_load(self, prompt: Sequence[int], rank: int, max_tokens: int) -> None:
        """Make one write of a load fail on one rank, if the ranks are in this process."""
        self.ask_to_store(prompt, None)
        executor = self.last.executor
        if isinstance(executor, KitRanks):
            executor.fail_next_write(rank)
        self.ask(prompt, max_tokens, None)
        self.settle()

    def compute_after_a_failure(self, prompt: Sequence[int], num_stored: int, max_tokens: int) -> None:
        """Compute after lost blocks, restore the blocks, then check the KV that was computed after them."""
        start = prompt[:num_stored]
        self.ask_to_store(start, None)
        self.break_store()
        self.ask(prompt, 1, None)
        self.settle()
        self.ask_to_store(start, None)
        self.ask(prompt, max_tokens, None)

    def sleep(self, index: int) -> None:
        """Let one engine sleep and wake up between two requests."""
        self.settle()
        self.engines[index % len(self.engines)].sleep()

    def forget_local_caches(self) -> None:
        """Reset the engines' prefix caches; the connector keeps what it has stored."""
        for engine in self.engines:
            engine.forget_local_cache()

    def reset_caches(self) -> None:
        for engine in self.engines:
            engine.reset_cache()

    def change_weights(self, *, is_named: bool) -> None:
        self._num_updates += 1
        for engine in self.engines:
            engine.change_weights(f"version {self._num_updates}" if is_named else None)

    def step(self) -> bool:
        """Do one step of each engine and one handover."""
        moved = any([engine.move() for engine in self.engines])
        moved = self._hand_over() or moved
        self.story.raise_if_broken()
        return moved

    def _hand_over(self) -> bool:
        moved = False
        for handoff in self._handoffs:
            answer = self.engines[0].answers[f"p{handoff.number}"]
            if answer.last is None or (handoff.is_over and handoff.params is not None):
                continue
            if handoff.params is None:
                handoff.params = answer.last.kv_transfer_params
            if not handoff.is_over:
                self._ask_decode(handoff, dict(handoff.params) if handoff.params is not None else None)
                moved = True
        return moved

    def _ask_decode(self, one: Handoff, params: dict[str, Any] | None) -> None:
        one.is_over = True
        self.last.ask(f"d{one.number}", one.prompt, max_tokens=one.max_tokens, salt=one.salt, params=params)

    # --- Rest --------------------------------------------------------------------------------------

    def settle(self, *, until_empty: bool = False) -> None:
        """Step until nothing is left to do. Raises ContractBroken, which names what does not end.

        `until_empty`: and until no block is held.
        """
        self.site.patience.moved()
        while not self._is_at_rest() or (until_empty and any(e.holds_blocks for e in self.engines)):
            if self.step():
                self.site.patience.moved()
            elif not self.site.patience.wait(self.engines):
                self._report_hangs()
                self.story.raise_if_broken()
                raise AssertionError(f"this hang breaks no rule of the connector\n{self.story.text()}")

    def _is_at_rest(self) -> bool:
        return all(engine.is_at_rest for engine in self.engines) and all(
            one.is_over or self.engines[0].answers[f"p{one.number}"].last is None for one in self._handoffs
        )

    def _report_hangs(self) -> None:
        for engine in self.engines:
            story, ledger = self.story, engine.ledger
            # Requests that were not aborted come first: then the abort is not the cause.
            for request_id in sorted(ledger.loading, key=lambda i: (i in ledger.ended, i)):
                ranks = ledger.ranks_that_received(request_id)
                if request_id in ledger.ended:
                    detail = f"{request_id} was aborted; its load never ended ({ranks})"
                    story.check("abort-leaks", False, detail)
                rule = (
                    "empty-step-skipped" if self._ends_with_tokens(engine, request_id) else "load-never-ends"
                )
                detail = f"the load of {request_id} never ends ({ranks})"
                story.check(rule, False, detail)
            for request_id in sorted(ledger.lent, key=lambda i: (i in ledger.aborted, i)):
                ranks = ledger.ranks_that_sent(request_id)
                rule = "abort-leaks" if request_id in ledger.aborted else "delayed-free-never-returned"
                if rule != "abort-leaks" and self._ends_with_tokens(engine, request_id):
                    rule = "empty-step-skipped"
                detail = f"the blocks of {request_id} were kept and are never freed ({ranks})"
                story.check(rule, False, detail)
            if engine.open_ids and engine.half.num_deferred:
                story.check(
                    "lookup-deferred-for-ever", False, f"{engine.open_ids} wait for a lookup's answer"
                )
            pending = engine.half.has_pending_push_work()
            story.check("work-pending-for-ever", not pending, "has_pending_push_work() stays true")
            story.check(
                "delayed-free-never-returned",
                not engine.holds_blocks or bool(engine.open_ids),
                "every request has ended, and blocks are still held",
            )

    def _ends_with_tokens(self, engine: KitEngine, request_id: str) -> bool:
        """Return whether a transfer that hung in empty steps ends in steps with tokens. Ends the example."""
        self.story.is_silent = True
        try:
            for waiting in engine.open_ids:  # Nothing may be queued before the probe.
                if waiting not in engine.ledger.loading and waiting != PROBE:
                    engine.abort(waiting)
            engine.move()
            num_slots = engine.num_free_slots
            if PROBE not in engine.answers and num_slots > len(PROBE_PROMPT):
                num_tokens = min(PROBE_STEPS, num_slots - len(PROBE_PROMPT))
                engine.ask(PROBE, PROBE_PROMPT, max_tokens=num_tokens)
            for _ in range(PROBE_STEPS):
                engine.move()
                if request_id not in engine.ledger.loading and request_id not in engine.ledger.lent:
                    return True
            return False
        finally:
            self.story.is_silent = False

    def finish(self) -> None:
        """Settle, check what is left, shut down, check again. Raises ContractBroken."""
        try:
            self.story.raise_if_broken()
            self.settle(until_empty=True)
            for _ in range(2):  # Let late reports arrive.
                self.step()
            for engine in self.engines:
                engine.collect_notes()
                self._check_pending(engine)
                if not self.site.case.remembers_requests:
                    engine.check_ids()
            self.story.raise_if_broken()
        finally:
            self.shutdown()
        self.story.raise_if_broken()

    def _check_pending(self, engine: KitEngine) -> None:
        self.story.check(
            "work-pending-for-ever",
            not engine.half.has_pending_block_frees(),
            "has_pending_block_frees() is true although no block is held",
        )
        for rule in ("load-never-ends", "abort-leaks", "empty-step-skipped", "lookup-deferred-for-ever"):
            self.story.check(rule, True)
        self.story.check("delayed-free-never-returned", not engine.ledger.lent)

    def shutdown(self) -> None:
        for engine in reversed(self.engines):
            engine.shutdown()
        left = new_threads(self._threads, self.site.thread_patience_s)
        if left:
            self.site.thread_patience_s = 0.0  # Later examples need not wait as long as the first.
        self.story.check("threads-left", not left, f"threads running after shutdown: {', '.join(left)}")
