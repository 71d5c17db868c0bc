"""Plots of the handoff benchmark as PNG: one for each goal that depends on the prompt's length."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lab.bench.handoff.goals import Goal, Lengthwise

PICTURES: dict[str, tuple[str, Callable[[Lengthwise], Goal]]] = {
    "handoff-first-token": ("First token: P/D less single engine", lambda row: row.first_goal),
    "handoff-second-token": ("Gap before the second token", lambda row: row.second_goal),
    "handoff-late-token": ("D's own first token: P/D less single engine", lambda row: row.late_goal),
}


def plot(rows: Sequence[Lengthwise], folder: Path) -> list[Path]:
    """Draw the plots. Solid: measured median; dashed, in the same colour: goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for name, (title, goal_of) in PICTURES.items():
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        for mode in dict.fromkeys(row.mode for row in rows):
            line = [row for row in rows if row.mode == mode]
            tokens, goals = [row.num_tokens for row in line], [goal_of(row) for row in line]
            (drawn,) = axes.plot(tokens, [goal.measured * 1e3 for goal in goals], marker="o", label=mode)
            limits = [goal.limit * 1e3 for goal in goals]
            axes.plot(tokens, limits, linestyle="--", linewidth=1, color=drawn.get_color())
        axes.set(xlabel="prompt tokens", ylabel="ms", title=f"{title} (dashed: goal)")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.tight_layout()
        pictures.append(folder / f"{name}.png")
        figure.savefig(pictures[-1], dpi=110)
        pyplot.close(figure)
    return pictures
