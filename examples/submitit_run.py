"""`meshwright train` as a job of SLURM, sent from Python through submitit.

::

    python examples/submitit_run.py examples/train.toml runs/first

Each task is a rank. Before the time is over, or when the job has to make room, submitit sends it
again, and it goes on from its newest checkpoint.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import submitit

from meshwright.cli import main


@dataclass
class Train(submitit.helpers.Checkpointable):
    """The command as a job that submitit may send again."""

    config: str
    folder: str

    def __call__(self, *_: object) -> int:
        """Train as the rank of this task."""
        submitit.helpers.TorchDistributedEnvironment().export()
        where = ["--run.folder", self.folder, "--run.save-every", "500"]
        return main(["train", self.config, *where])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/submitit_run.py CONFIG.toml FOLDER")
    config, folder = sys.argv[1:]
    executor = submitit.AutoExecutor(folder=f"{folder}/log")
    executor.update_parameters(nodes=2, tasks_per_node=8, gpus_per_node=8, timeout_min=240)
    job = executor.submit(Train(config, folder))
    print(job.job_id)
