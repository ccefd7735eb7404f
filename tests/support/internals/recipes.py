"""Names inside of `meshwright.recipes`."""

from __future__ import annotations

from support.internals import names_inside

__getattr__ = names_inside(
    {
        "meshwright.recipes": "loop, parity",
        "meshwright.recipes.config": (
            "DataConfig, ModelConfig, OptimizerConfig, TrainConfig, option_lines, read_config"
        ),
        "meshwright.recipes.language_model": (
            "LanguageModel, adamw, initialize, learning_rate, set_learning_rate"
        ),
        "meshwright.recipes.loop": "RunOutcome, StopRequest, train",
        "meshwright.recipes.metrics": "MetricsFile, RunProgress, live_display",
        "meshwright.recipes.parity": "Parity, TOLERANCE, check_parity",
        "meshwright.recipes.task": "Data, cross_entropy, open_task, sketch, without_dropout",
        "meshwright.recipes.tensors.compare": "compare_runs",
        "meshwright.recipes.tensors.rows": "Sums, digest, trace_file",
        "meshwright.recipes.tensors.trace": "TensorTrace",
        "meshwright.recipes.text": "Windows, open_text, unigram_loss",
    }
)
