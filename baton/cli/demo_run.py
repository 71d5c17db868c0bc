"""Run of the demo: makes the small model, starts the processes, asks for all answers and shows them."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from rich.console import Console

import baton
from baton.checkpoints.families import FAMILIES
from baton.cli.demo_check import REQUEST_TIMEOUT_S, check
from baton.cli.demo_prompts import LONGEST, DemoPrompt, make_prompts, num_new_blocks
from baton.cli.demo_report import make_rounds_table, make_table, print_rounds_summary, print_summary
from baton.cli.demo_rounds import KEEPING, RoundsPlan, run_rounds
from baton.cli.demo_update import UpdateRun, make_update_table
from baton.cli.processes import ChildDied, Fleet, StartTimeout
from baton.cli.system import CONNECTORS, EnginePlan, HandoffArguments, SystemPlan, start_engines, start_system
from baton.core.errors import ConfigError

START_TIMEOUT_S = 180.0  # Importing torch is slow on a loaded machine.
MODEL_TIMEOUT_S = 120.0
FAMILY = "qwen3"
MODEL_ARGUMENTS = ("--hidden", "256", "--layers", "4")


def choose(
    connector: str | None, mode: str | None, stream: str | None, *, is_uneven: bool
) -> tuple[str | None, HandoffArguments]:
    """Return (the storing connector, if any; the handoff arguments). Raises ConfigError."""
    if connector in CONNECTORS:
        if mode not in (None, connector):
            raise ConfigError(f"is {connector!r}, and --mode is {mode!r}", field="connector")
        return None, HandoffArguments(connector, stream)
    if connector is None:
        return None, HandoffArguments(mode or "pull", stream)
    if connector not in KEEPING:
        raise ConfigError(f"must be one of {', '.join((*CONNECTORS, *KEEPING))}", field="connector")
    if connector != "multi" and (mode is not None or stream is not None):
        raise ConfigError("transfers no KV between engines; omit --mode and --stream", field="connector")
    if is_uneven:
        raise ConfigError("needs equal engines; use --tp and --block-size", field="connector")
    return connector, HandoffArguments(mode or "pull", stream)


def choose_family(name: str | None) -> str:
    """Return the small model's family; `name` may have - for _. Raises ConfigError."""
    family = FAMILY if name is None else name.replace("-", "_")
    if family not in FAMILIES:
        raise ConfigError(f"must be one of {', '.join(FAMILIES)}, is {name!r}", field="family")
    return family


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    fleet: Fleet
    console: Console
    num_prompts: int
    max_tokens: int
    seed: int
    began_s: float = field(default_factory=time.monotonic)

    def show_rounds(self, plan: RoundsPlan) -> bool:
        """Run both rounds and print the result. True if every outcome is good."""
        prompts = self._prompts(plan.engines[0].arguments.model)
        self._start(plan.system, plan.engines)
        outcomes = run_rounds(plan, prompts, max_tokens=self.max_tokens, restart=self._restart)
        self._check_running()
        self.console.print(make_rounds_table(outcomes, title=plan.title))
        print_rounds_summary(
            self.console,
            outcomes,
            took_s=time.monotonic() - self.began_s,
            log_folder=self.fleet.log_folder,
        )
        return all(outcome.is_good for outcome in outcomes)

    def show_update(self, plan: SystemPlan, folders: Sequence[Path]) -> bool:
        """Update the weights of a running pair and print the result. True if every stage is good."""
        self._start(plan, plan.engines)
        run = UpdateRun(
            plan, folders, num_prompts=self.num_prompts, max_tokens=self.max_tokens, seed=self.seed
        )
        vocab_size, longest = self._limits(folders[0])
        stages = run.run(vocab_size=vocab_size, longest=longest)
        self._check_running()
        self.console.print(make_update_table(stages))
        is_good = all(stage.is_good for stage in stages)
        verdict = (
            "Every answer is wholly of a version that its engine had."
            if is_good
            else f"Something is wrong; the engines' logs are in {self.fleet.log_folder}."
        )
        self.console.print(f"{verdict} {time.monotonic() - self.began_s:.0f} s in all.", soft_wrap=True)
        return is_good

    def show_handoffs(self, plan: SystemPlan) -> bool:
        """Hand every prompt over and print the result. True if every outcome is good."""
        arguments = plan.single[0].arguments
        assert arguments.block_size is not None
        prompts = self._prompts(arguments.model)
        self._start(plan, plan.engines)
        with httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            outcomes = [
                check(
                    client,
                    plan,
                    prompt,
                    must_move=num_new_blocks(prompts, index, block_size=arguments.block_size) > 0,
                    max_tokens=self.max_tokens,
                )
                for index, prompt in enumerate(prompts)
            ]
        self._check_running()
        self.console.print(make_table(outcomes, mode=plan.handoff.mode))
        print_summary(
            self.console,
            outcomes,
            took_s=time.monotonic() - self.began_s,
            model=arguments.model,
            log_folder=self.fleet.log_folder,
            command=_baton_command(),
        )
        return all(outcome.is_good for outcome in outcomes)

    def _start(self, system: SystemPlan | None, engines: Sequence[EnginePlan]) -> None:
        if system is not None:
            start_system(self.fleet, system, timeout_s=START_TIMEOUT_S, console=self.console)
        else:
            start_engines(self.fleet, engines, timeout_s=START_TIMEOUT_S, console=self.console)

    def _restart(self, engines: Sequence[EnginePlan]) -> None:
        """Kill engines without a warning, and start them again with empty memory."""
        urls = {engine.name: engine.url for engine in engines}
        started = {}
        for child in [child for child in self.fleet.children if child.name in urls]:
            self.console.print(f"killing {child.name}, and starting it again")
            child.send_signal(signal.SIGKILL)
            child.reap()
            self.fleet.forget(child)
            started[self.fleet.start_again(child)] = f"{urls[child.name]}/health"
        self.fleet.wait_ready(started, timeout_s=START_TIMEOUT_S)

    def _check_running(self) -> None:
        if ended := self.fleet.wait_exit(0):
            raise ChildDied(ended)

    def _prompts(self, model: Path) -> list[DemoPrompt]:
        vocab_size, longest = self._limits(model)
        return make_prompts(self.num_prompts, seed=self.seed, vocab_size=vocab_size, longest=longest)

    def _limits(self, model: Path) -> tuple[int, int]:
        """Size of the vocabulary, and the longest prompt."""
        config = json.loads((model / "config.json").read_text())
        limit = config.get("max_position_embeddings", LONGEST + self.max_tokens) - self.max_tokens
        return config["vocab_size"], min(LONGEST, limit)

    def small_model(self, cache: Path, family: str, seed: int = 0) -> Path:
        """Return the folder of the small model of this family; `seed`: of its weights.

        A child process makes it once, because this one must not import torch.
        """
        of_family = "" if family == FAMILY else f"-{family}"
        of_seed = f"-seed-{seed}" if seed else ""
        folder = cache / f"demo-model-{baton.__version__}{of_family}{of_seed}"
        if (folder / "config.json").is_file():
            return folder
        self.console.print(f"making a small model in {folder}", soft_wrap=True)
        unfinished = cache / f"{folder.name}.{os.getpid()}"
        writer = [sys.executable, "-m", "baton.cli", "model", "new", str(unfinished), "--family", family]
        child = self.fleet.start("model", [*writer, *MODEL_ARGUMENTS, "--seed", str(seed)])
        if self.fleet.wait_exit(MODEL_TIMEOUT_S) is None:
            raise StartTimeout(f"the model was not made within {MODEL_TIMEOUT_S:.0f} s; see {child.log_path}")
        if child.exit_status() != 0:
            raise ChildDied(child)
        self.fleet.forget(child)
        if not folder.exists():  # Another demo may have been faster; its model has the same bytes.
            unfinished.rename(folder)
        return folder


def _baton_command() -> str:
    """Return the command for `baton`: `make demo` installs it in an environment that is not on the PATH."""
    if shutil.which("baton") is not None:
        return "baton"
    script = Path(sys.executable).with_name("baton")
    return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
