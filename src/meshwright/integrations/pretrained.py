"""Models of transformers from a configuration or a folder, with adapters of PEFT.

Code inside a model's folder is never run: only classes of transformers are built.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import PlanError

_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of a model's folder that are neither weights nor code, such as tokenizers."""


def read_description(path: Path, **values: object) -> Any:  # noqa: ANN401 - a PretrainedConfig
    """Read the configuration of a model, a file or a folder with one; ``values`` override it.

    Raises ``PlanError`` if there is none or it cannot be read.
    """
    transformers = _package("transformers", "[model] hugging_face")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanError(
            f"[model] hugging_face: expected a config.json or a folder with one, found no {file}; "
            "models are read from this machine alone, so download it first"
        )
    try:
        return transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False, **values)
    except Exception as error:  # OSError, ValueError, and what classes of configurations raise
        raise PlanError(f"[model] hugging_face = {path}: {_first_line(error)}") from error


def build_model(
    description: Any,  # noqa: ANN401 - a PretrainedConfig
    weights: Path | None,
) -> nn.Module:
    """Build the class named in ``architectures``, with random weights or those of a folder.

    Raises ``PlanError`` for a class that transformers does not have, and for weights that lack a
    parameter.
    """
    transformers = _package("transformers", "[model] hugging_face")
    name = next(iter(description.architectures or ()), "AutoModelForCausalLM")
    kind = getattr(transformers, name, None)
    if kind is None:
        raise PlanError(
            f"[model] hugging_face: transformers {transformers.__version__} has no class {name!r}, "
            "which `architectures` names; code from a folder is never run"
        )
    try:
        if weights is not None:
            return _loaded(kind, description, weights)
        model = kind.from_config(description) if hasattr(kind, "from_config") else kind(description)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"[model] hugging_face: {name}: {_first_line(error)}") from error
    return model.float()


def _loaded(kind: Any, description: Any, weights: Path) -> nn.Module:  # noqa: ANN401 - theirs
    model, said = kind.from_pretrained(
        str(weights),
        config=description,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    lacking = [*said["missing_keys"], *said["mismatched_keys"]]
    if lacking:
        raise PlanError(
            f"[model] weights = {weights}: {len(lacking)} parameters are missing or have another "
            f"shape, {lacking[0]!r} first; give the weights of this model"
        )
    return model.train()


def add_adapter(model: nn.Module, fields: Mapping[str, Any]) -> nn.Module:
    """Add LoRA adapters to ``model``; ``fields`` are those of PEFT's ``LoraConfig``."""
    peft = _package("peft", "[model] peft")
    try:
        config = peft.LoraConfig(**fields)
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except Exception as error:  # wrong fields, and targets that the model does not have
        raise PlanError(f"[model] peft: {_first_line(error)}") from error


def save_adapter(model: Any, state: Mapping[str, Tensor], base: str, folder: Path) -> None:  # noqa: ANN401 - a PeftModel
    """Write the adapter of ``model``, with the values of ``state``, as PEFT reads it."""
    for config in model.peft_config.values():
        config.base_model_name_or_path = base
    model.save_pretrained(folder, state_dict=dict(state), save_embedding_layers=False)


def exported_description(
    description: Any,  # noqa: ANN401 - a PretrainedConfig
    model: nn.Module,
    dtype: str,
) -> dict[str, Any]:
    """Return the configuration for loading the exported weights of ``model``, of ``dtype``."""
    found = {key: value for key, value in description.to_dict().items() if key[:1] != "_"}
    return {**found, "architectures": [type(model).__name__], "dtype": dtype}


def copy_beside(source: Path, target: Path) -> None:
    """Copy tokenizer files and the like from one model's folder to another."""
    for pattern in _BESIDE:
        for file in source.glob(pattern):
            is_of_weights = file.name.endswith(".index.json")
            if not is_of_weights and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)


def _package(name: str, key: str) -> ModuleType:
    try:
        package = importlib.import_module(name)
    except ImportError as error:
        raise PlanError(f"{key} needs {name}, which cannot be imported: {error}") from error
    if name == "transformers":
        package.logging.set_verbosity_error()  # output of several ranks would mix
        package.logging.disable_progress_bar()
    return package


def _first_line(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.strip()
