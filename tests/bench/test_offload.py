"""The benchmark of offload measures what it says, on a model that takes no time."""

from pathlib import Path

import pytest
from rich.console import Console

from baton.bench.offload import measure_copies, measure_returns, print_tables
from baton.engine.new_model import write_checkpoint


@pytest.mark.slow
def test_a_prompt_returns_from_host_memory_and_the_tables_say_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=8192)
    copies = measure_copies(num_blocks=8, turns=3)
    returns = measure_returns(200, repeats=2, model=tmp_path)
    assert copies["of_memcpy"]["memcpy"] == 1
    assert len(copies["gb_per_s"]) == 5
    assert returns["tokens_are_equal"]
    assert 100 < returns["loaded_tokens"] < 200
    console = Console(width=120, record=True)
    print_tables(copies, returns, console)
    said = console.export_text()
    assert "tokens are equal" in said
    assert "store, shuffled" in said
