"""`baton model`: makes small checkpoints for tests and demos."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from baton.checkpoints.architecture import Family

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make checkpoints."""


@app.command()
def new(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; created if missing.")],
    family: Annotated[str, typer.Option(help=f"{', '.join(get_args(Family))}.")] = "qwen3",
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 256,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads; half of the heads by default.", show_default=False)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Head size; hidden / heads by default.", show_default=False)
    ] = None,
    intermediate: Annotated[
        int | None, typer.Option(help="Size of the MLP; 3 * hidden by default.", show_default=False)
    ] = None,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 2048,
    max_position: Annotated[int, typer.Option(help="Largest number of tokens of a sequence.")] = 4096,
    sliding_window: Annotated[
        int | None, typer.Option(help="Attention window of families that have one.", show_default=False)
    ] = None,
    rope_scaling: Annotated[str, typer.Option(help="none, linear, llama3 or yarn.")] = "none",
    tie_word_embeddings: Annotated[
        bool, typer.Option(help="Use one matrix for input and output embeddings.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Equal arguments make equal bytes.")] = 0,
) -> None:
    """Write a small checkpoint with random weights, a trained tokenizer and a chat template."""
    from baton.checkpoints.random_model import write_checkpoint
    from baton.core.errors import UserError

    try:
        written = write_checkpoint(**context.params)  # The options have the names of its arguments.
    except UserError as error:
        typer.echo(f"baton model new: {error}", err=True)
        raise typer.Exit(2) from error
    size_mib = sum(file.stat().st_size for file in written.iterdir() if file.is_file()) / (1 << 20)
    typer.echo(f"wrote {written} ({size_mib:.1f} MiB); try: baton serve {written}")
