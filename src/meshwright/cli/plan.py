"""``meshwright plan``; it starts without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from meshwright import planner
from meshwright.errors import PlanError
from meshwright.planner.hardware import calibrated_file, hardware_names, load_hardware
from meshwright.planner.plans import answer
from meshwright.planner.scoring import score
from meshwright.planner.shapes import model_shape
from meshwright.planner.software import OURS

_LONGEST = 600


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Say which layouts of a model fit, how fast they are, and why, without running any.

    Prints the best plan as TOML, the layouts that no other beats in both time and memory, and what
    is wrong with the best one's neighbors. No GPU is needed.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")] = ""
    """A Hugging Face config.json, a TOML of a model's sizes, or package.module:function, which
    returns a module and an example batch."""
    gpus: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Number of GPUs."""
    hardware: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """A shipped machine, or a TOML file of one; list shows the names. By default what --calibrate
    has measured on this machine, else h100."""
    batch: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Sequences of a step; 0 means 4 million tokens, in a multiple of the GPUs."""
    seq: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Tokens of a sequence; 0 means the model's own."""
    fit_only: bool = False
    """Only say whether a layout fits; the exit status is 1 if none does."""
    write: Annotated[str, tyro.conf.arg(metavar="FILE.toml")] = ""
    """Write the best plan, or what --calibrate measures, to a file."""
    calibrate: bool = False
    """Measure this machine and write its hardware file, which later plans and runs read."""
    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 40.0
    """With --calibrate: how long to measure."""
    data: Annotated[str, tyro.conf.arg(metavar="FILE.json")] = ""
    """Score the planner on a file of published runs instead."""
    leave_out: bool = False
    """With --data: fit the constants anew without the source that they score."""

    def run(self, words: list[str]) -> int:
        if self.data:
            print("\n".join(score(self.data, leave_out=self.leave_out).lines()))
            return 0
        if self.hardware == "list":
            print("\n".join(hardware_names()))
            return 0
        if self.calibrate:
            return self._calibrate()
        if not self.model:
            raise PlanError(
                "expected a MODEL: a config.json, a model's .toml, or package.module:function"
            )
        for name, least in (("gpus", 1), ("batch", 0), ("seq", 0)):
            if not least <= (value := getattr(self, name)) <= 10_000_000:
                raise PlanError(f"--{name}: expected {least} to 10,000,000, found {value:,}")
        default = str(calibrated_file()) if calibrated_file().exists() else "h100"
        hardware = load_hardware(self.hardware or default)
        about: dict[str, Any] = {}
        if ":" in self.model:
            shape, trace = planner.named_model(self.model, self.seq)
            about = {
                "blocks": trace.blocks or ("*",),
                "recomputing": find_spec("scipy")
                and partial(planner.recompute_for, trace, hardware),
            }
        else:
            shape = model_shape(self.model, self.seq or None)
            # Layers of Hugging Face's models are no chain of modules: a pipeline traces them.
            about = {"software": replace(OURS, traced_stages=self.model.endswith(".json"))}
        found = answer(shape, self.gpus, hardware, self.batch, **about)
        print("\n".join(found.fit_lines if self.fit_only else found.lines))
        if found.toml and self.write:
            Path(self.write).write_text(found.toml)
        return 0 if found.toml else 1

    def _calibrate(self) -> int:
        if not 0 < self.seconds <= _LONGEST:
            raise PlanError(f"--seconds: expected 0 to {_LONGEST}, found {self.seconds:g}")
        path = Path(self.write) if self.write else calibrated_file()
        if path.suffix != ".toml":
            raise PlanError(f"--write: expected a .toml file, found {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        # As the commands are imported, when one is used: this one needs torch.
        doctor = import_module(f"{__package__}.doctor")
        text = doctor.hardware_text(self.seconds)
        path.write_text(text)
        print(f"{text}# written to {path}")
        return 0
