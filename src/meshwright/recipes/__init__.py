"""The training job: a byte-level language model on text, or a user's own model, data and loss.

Bottom-up:

    config          the configuration of a run, and the help texts of its keys
    text            text as bytes, and windows of them
    language_model  the byte model, its optimizer and the learning rate
    metrics         one line of JSON per step, progress, and the last steps as a timeline
    usage           memory by category, and the floating-point operations of the model
    task            model, data, loss and optimizer of a run, ours or the user's
    run_folder      where a run writes, what it resumes from, and its state as a checkpoint
    tensors         traces of tensors, and comparison of two runs by them
    parity          the check that a layout trains the same model as one process
    loop            the training loop, validation, and stopping on request
"""

from __future__ import annotations

__all__: list[str] = []
