"""The main job: a byte-level language model trained on text files.

Bottom-up:

    config          the configuration of a run
    options         its keys in words
    text            text as bytes, and windows of them
    language_model  the model
    optimization    the optimizer and its learning rate
    runs            the folder of a run, and what is written and read there
    tensors         traces of tensors, and two runs compared
    validation      the loss on held-out text
    loop            the main job
    parity          the proof that a layout trains the same model
"""

from __future__ import annotations

__all__: list[str] = []
