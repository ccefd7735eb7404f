"""The main job: a byte-level language model on text, or a user's own model, data and loss.

Bottom-up:

    config          the configuration of a run, and its keys in words
    text            text as bytes, and windows of them
    language_model  the byte model, its optimizer and the learning rate
    metrics         a line of JSON a step, progress, and the last steps as a timeline
    usage           memory by category, and the operations that the model needs
    factories       functions that a configuration names
    task            model, data, loss and optimizer of a run, whoever wrote them
    run_folder      where a run writes, what it resumes from, and its state as a checkpoint
    tensors         traces of tensors, and two runs compared
    parity          the proof that a layout trains the same model
    loop            the main job, its loss on held-out text, and its stop on request
"""

from __future__ import annotations

__all__: list[str] = []
