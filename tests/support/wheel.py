"""The package as a wheel, in an environment that knows nothing of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """What a command prints, with the programs of ``cwd/venv`` and no path into the repository."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PYTHON", "TORCHELASTIC", "VIRTUAL_ENV"))
    }
    path = f"{cwd / 'venv/bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr[-5000:]}"
    return done.stdout


def built(folder: Path) -> tuple[Path, Path]:
    """Build wheel and sdist, as `make wheel` does."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def environment(folder: Path) -> None:
    """Make ``folder/venv`` with the wheel, and with torch and the others from here."""
    wheel, _ = built(folder / "dist")
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    # Of folders that a .pth file names no .pth file is read: an editable install stays behind.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    torchrun = folder / "venv/bin/torchrun"
    torchrun.write_text(f"#!{python}\nfrom torch.distributed.run import main\nmain()\n")
    torchrun.chmod(0o755)
