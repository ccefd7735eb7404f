"""The only room that uses what torch keeps private: a new torch breaks the library here or nowhere.

It imports torch alone, so that every room which uses torch may use it. A name that
torch lacks raises when the file that needs it is loaded. `distributed` is for `comm` alone, as
`torch.distributed` is, and for simulated devices, as `simulation` is; `compile` loads the compiler,
for `compiler` and the splitting of models.

Bottom-up:

    required     a private name of torch, or an error that says what is missing
    trees        nested values as torch flattens them
    tensors      memory, versions, subclasses and modes of tensors; operators on lists of them
    autograd     the backward pass under way, hooks of tensors, what nodes have saved
    modules      hooks and buffers of modules and optimizers; questions of torch's state dicts
    tracing      functions that compilers leave alone, and the compiler where it is loaded
    simulation   functions of torch that a simulated device replaces
    distributed  process groups, backends, meshes and DTensors
    checkpoints  torch's distributed checkpoint: loading it loads that
    compile      the parts of the compiler: loading it loads dynamo and inductor
"""

from __future__ import annotations

__all__: list[str] = []
