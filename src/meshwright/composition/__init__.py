"""Turns a plan and a model into a training step.

Bottom-up:

    example_run    a run of a copy of the model on its example
    description    descriptions of layouts: parameters, collectives, settings
    data_layout    the ranks along axes, and one interface to data-parallel layouts
    whole_run      compares a model split over an axis with the full one, records its traffic
    carried_plans  plans that a model carries in attributes
    tensor_rules   axis tensor: styles by name, and sets of them for known models
    context_rules  axis context: what of a batch is split, and how that is compared
    expert_rules   axis expert: which modules are split, and what a model must say
    stages         axis pipeline: a model split into stages
    own_model      axis pipeline: the user's model, which shares tensors with its stages
    loss_sources   parameters that a loss may read
    trainable      a model that has been laid out, and its step
    pipelined      the same over stages of several ranks
    checks         contradictions between a plan and a model
    laying_out     what is done to a module: values, dropout, layers, data axes, graphs
    assembly       `parallelize`: the only file that knows all strategies
"""

from __future__ import annotations

from meshwright.composition.assembly import check_model, parallelize
from meshwright.composition.trainable import EvalResult, Loss, StepResult, Trainable

__all__ = ["EvalResult", "Loss", "StepResult", "Trainable", "check_model", "parallelize"]
