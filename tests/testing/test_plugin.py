"""The pytest plugin: cheap until it is used, and reports that pytest prints well."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def outside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of somebody else, with the plugin loaded by its entry point or by name."""
    paths = (str(ROOT / "src"), str(ROOT / "tests"))  # the second for what the conftest imports
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    return pytester


def test_pure_tests_load_no_torch_and_start_no_server(outside: pytest.Pytester) -> None:
    outside.makepyfile(
        """
        import os, sys

        def test_pure():
            assert "torch" not in sys.modules
            children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
            assert not children
        """
    )
    outside.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.few(0, slow=1)
@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_reports_and_outcomes(outside: pytest.Pytester, mode: str) -> None:
    outside.makepyfile(
        helper_of_tests="LIMIT = 3\n",
        test_them="""
        import pytest
        from meshwright.comm import communicator

        def check(limit):
            rank = communicator().rank
            print("on rank", rank)
            assert rank + 1 < limit

        def test_good(ranks):
            ranks(2, check, 3)

        def test_bad(ranks):
            ranks(2, check, 2)

        def test_skipped(ranks):
            ranks(2, lambda: pytest.skip("not today"))

        @pytest.mark.xfail(strict=True)
        def test_expected(ranks):
            ranks(1, check, 0)
        """,
    )
    result = outside.runpytest_subprocess(f"--import-mode={mode}", "-rs", "test_them.py")
    result.assert_outcomes(passed=1, failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "*ranks failed; rank 1 was first: it raised AssertionError: assert (1 + 1) < 2*",
            "*on rank 1*",
            "SKIPPED*not today",
        ]
    )
    result.stdout.no_fnmatch_line("*_exchange*")


@pytest.mark.slow
def test_the_backend_of_the_command_line(outside: pytest.Pytester) -> None:
    outside.makepyfile(
        """
        import os
        import pytest
        from meshwright.comm import communicator

        def test_it(ranks):
            ranks(2, lambda: None)

        @pytest.mark.backends("shm", "gloo")
        def test_each(ranks, request):
            name = request.node.callspec.params["ranks"]
            expected = {"shm": "meshwright", "gloo": "gloo"}[name]
            assert ranks(2, lambda: communicator().backend) == [expected] * 2
            variable = lambda: os.environ["MESHWRIGHT_CPU_BACKEND"]
            assert ranks(2, variable, connected=False) == [name] * 2
        """
    )
    result = outside.runpytest_subprocess("--ranks-backend=nonsense")
    result.assert_outcomes(failed=1, passed=2)
    result.stdout.fnmatch_lines(["*nonsense*"])


@pytest.mark.slow
def test_devices_of_markers_and_of_the_command_line(outside: pytest.Pytester) -> None:
    outside.makepyfile(
        """
        import pytest
        from meshwright.comm import communicator

        def backend():
            return communicator().backend

        def test_pure():
            pass

        @pytest.mark.devices("host", "simulated")
        def test_both(ranks, request):
            name = request.node.callspec.params["ranks"]
            (found,) = set(ranks(2, backend, backend="gloo"))
            assert found == {"host": "gloo", "simulated": "simulated"}[name]

        @pytest.mark.devices("host", reason="it is about Gloo")
        def test_host(ranks):
            assert ranks(2, backend, backend="gloo") == ["gloo"] * 2

        @pytest.mark.devices("simulated")
        def test_simulated(ranks):
            assert ranks(2, backend) == ["simulated"] * 2

        @pytest.mark.backends("shm", "gloo")
        def test_backends(ranks):
            ranks(2, backend)
        """
    )
    outside.runpytest_subprocess().assert_outcomes(passed=7)
    chosen = outside.runpytest_subprocess("--ranks-devices=simulated")
    chosen.assert_outcomes(passed=3, deselected=2)


def test_the_library_does_not_load_the_harness() -> None:
    assert "meshwright.testing" in sys.modules  # by the plugin
    for file in (ROOT / "src" / "meshwright").rglob("*.py"):
        if "testing" not in file.parts and file.name != "__init__.py":
            assert "import meshwright.testing" not in file.read_text()
