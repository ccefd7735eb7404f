"""The only package that uses private parts of torch, so a new torch can break the library only
here.

It imports only torch, so that every package which uses torch may import it. A missing private name
raises when the file that needs it is loaded. `distributed` is only for `comm`, like
`torch.distributed`, and for simulated devices, like `simulation`; `compile` loads the compiler, for
`compiler` and the splitting of models.

Bottom-up:

    required     a private name of torch, or an error that says what is missing
    trees        torch's flattening of nested values
    tensors      memory, versions, subclasses and modes of tensors; operators on lists of them
    autograd     the running backward pass, hooks of tensors, values saved by nodes
    modules      hooks and buffers of modules and optimizers; calls of torch's state-dict functions
    tracing      functions that compilers skip, and the compiler if it is loaded
    simulation   functions of torch that a simulated device replaces
    distributed  process groups, backends, meshes and DTensors
    checkpoints  torch's distributed checkpoint; importing this file imports it
    compile      parts of the compiler; importing this file imports dynamo and inductor
"""

from __future__ import annotations

__all__: list[str] = []
