"""Releases of vLLM over other kernels: the comparison that admits one, and the tests that it skips."""

from importlib.metadata import version
from pathlib import Path
from runpy import run_path

from tests.vllm.releases import lacking_ops

SCRIPT = run_path(str(Path(__file__).parents[2] / "scripts" / "vllm_release.py"))
BINDINGS = """
  ops.def("kept(Tensor! out, str kind=\\"auto\\") "
          "-> ()");
  ops.def(
      "changed(Tensor out, int[]? shape=None) -> ()");  // ops.def("unused() -> ()")
  ops.def("new() -> ()", placeholder_op);
"""
KERNELS = b'\0kept(Tensor! out, str kind="auto") -> ()\0changed(Tensor out) -> ()\0'


def test_ops_whose_schema_is_not_in_the_kernels_differ() -> None:
    assert SCRIPT["differing_ops"](BINDINGS, KERNELS) == ["changed", "new"]


def test_requirements_are_met_by_the_environment_or_by_pins() -> None:
    wanted = f"""
    -r other.txt
    pytest == {version("pytest")}  # Installed.
    pytest > 999
    absent[extra] >= 2
    absent > 3; python_version < "3"
    """
    unmet = SCRIPT["unmet"]
    assert unmet(wanted, []) == ["pytest>999", "absent[extra]>=2"]
    assert unmet(wanted, ["absent==2.0"]) == ["pytest>999"]


def test_tests_that_need_an_op_are_named_for_releases_over_other_kernels(tmp_path: Path) -> None:
    rows = tmp_path / "rows.toml"
    rows.write_text('["0.9.0".differing_ops]\na = ["test_a.py", "test_b.py"]\nb = ["test_b.py"]\nc = []\n')
    assert lacking_ops("0.9.0+cpu", rows) == {"test_a.py": ["a"], "test_b.py": ["a", "b"]}
    assert lacking_ops("0.9.0", rows) == {}
