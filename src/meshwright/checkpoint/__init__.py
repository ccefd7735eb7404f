"""Checkpoints that are complete or absent, with every byte verified before it is used.

A *checkpoint* is a directory ``step_00000120`` with one safetensors file for each writing rank and
a *manifest* that names every tensor, its *pieces* (boxes of the global shape) and their checksums.
An interrupted save leaves a *torso*, which has another name and is never read. A checkpoint has no
pickles, unlike torch's own files, which `exchange` reads and writes. One job at a time writes to a
folder of checkpoints, which it *claims*.

Bottom-up:

    document     sealed JSON
    tensor_file  bytes of a safetensors file
    manifest     pieces of tensors, files and checksums
    pieces       the assignment of pieces to writers
    storage      file operations
    together     runs a step on all ranks; if one fails, all raise
    claims       locks that keep other jobs out of a folder
    reading      verified reads
    steps        the folder of checkpoints
    writing      all of a checkpoint, or nothing
    background   the same while the loop goes on
    nested       nested state as named tensors
    training     `save` and `load`: a training loop under any wrapper
    exchange     weights in other formats, and the contents of checkpoints
"""

from __future__ import annotations

from meshwright.checkpoint.background import PendingSave, finish
from meshwright.checkpoint.claims import release
from meshwright.checkpoint.document import JSON
from meshwright.checkpoint.exchange.contents import Contents, Difference, contents, differences
from meshwright.checkpoint.exchange.conversion import FORMATS, export_weights, import_weights
from meshwright.checkpoint.manifest import Manifest, Piece, TensorRecord
from meshwright.checkpoint.nested import flatten, unflatten
from meshwright.checkpoint.pieces import ReadTensor, ShardedPiece
from meshwright.checkpoint.reading import (
    Checkpoint,
    Reader,
    load_into,
    load_tensors,
    read_manifest,
    verify,
)
from meshwright.checkpoint.steps import latest, step_directory
from meshwright.checkpoint.storage import Storage
from meshwright.checkpoint.training.loops import Loaded, Stateful, load, save
from meshwright.checkpoint.training.named_optimizer import load_optimizer_state, optimizer_state
from meshwright.checkpoint.writing import Communicator, claim, save_tensors

__all__ = [
    "FORMATS",
    "JSON",
    "Checkpoint",
    "Communicator",
    "Contents",
    "Difference",
    "Loaded",
    "Manifest",
    "PendingSave",
    "Piece",
    "ReadTensor",
    "Reader",
    "ShardedPiece",
    "Stateful",
    "Storage",
    "TensorRecord",
    "claim",
    "contents",
    "differences",
    "export_weights",
    "finish",
    "flatten",
    "import_weights",
    "latest",
    "load",
    "load_into",
    "load_optimizer_state",
    "load_tensors",
    "optimizer_state",
    "read_manifest",
    "release",
    "save",
    "save_tensors",
    "step_directory",
    "unflatten",
    "verify",
]
