"""The table of the architecture: rooms, arrows, sizes and forbidden names, in one place."""

from __future__ import annotations

__all__ = [
    "ALLOWED",
    "BANNED_WORDS",
    "C10D",
    "C10D_ROOMS",
    "CONSOLE_ROOM",
    "FACTORIES",
    "FILE_LINES",
    "FUNCTION_LINES",
    "NAMES_PEERS",
    "OF_OTHERS",
    "ON_DEFAULT_DEVICE",
    "OPTIONAL",
    "OPTIONAL_ROOMS",
    "PEERS",
    "PICKLE",
    "PICKLE_FILES",
    "PICKLE_ROOMS",
    "PRIVATE_DOORS",
    "PRIVATE_ROOM",
    "PUBLIC_FILES",
    "ROOM_LINES",
    "STATE_FILES",
    "TORCH_FREE",
    "UNIONS",
    "WAYS_ROUND",
    "WITH_TORCH",
]

# Modules that users import by their own path.
PUBLIC_FILES = frozenset(
    {
        "comm/process_groups.py",
        "data.py",
        "fsdp/wrap.py",
        "mesh.py",
        "pipelining/microbatch.py",
        "pipelining/schedules.py",
        "pipelining/stage.py",
        "plan.py",
        "transfer.py",
    }
)

FILE_LINES = 1000
FUNCTION_LINES = 100

# Lines of Python in each room. Reductions lower them; a new capability may raise its room's, and
# its commit says by how much.
ROOM_LINES: dict[str, int] = {
    "__main__": 8,
    "axes": 159,
    "checkpoint": 5934,
    "cli": 1046,
    "comm": 16094,
    "compiler": 1236,
    "composition": 5917,
    "context_parallel": 2063,
    "data": 432,
    "data_parallel": 16749,
    "doctor": 782,
    "environment": 261,
    "errors": 155,
    "expert_parallel": 1381,
    "fsdp": 5691,
    "gradients": 1715,
    "integrations": 1214,
    "launching": 1367,
    "layout": 539,
    "losses": 620,
    "mesh": 7,
    "pipelining": 8052,
    "plan": 469,
    "planner": 3839,
    "precision": 79,
    "randomness": 1111,
    "recipes": 3899,
    "reference": 257,
    "report": 975,
    "sampling": 339,
    "schedule": 2456,
    "settings": 156,
    "tensor_parallel": 3400,
    "testing": 3392,
    "timeline": 242,
    "toml_source": 560,
    "torch_internals": 1304,
    "transfer": 323,
}

# Each room may import itself and the rooms of its row. A room yet to come has its row already.
_PURE = frozenset(
    {
        "axes",
        "environment",
        "errors",
        "layout",
        "plan",
        "precision",
        "sampling",
        "schedule",
        "settings",
        "timeline",
        "toml_source",
    }
)
_COMM = _PURE | {"comm", "mesh", "torch_internals"}
_STRATEGY = _COMM | {"gradients", "randomness"}
_STRATEGIES = _STRATEGY | {
    *("context_parallel", "data_parallel", "expert_parallel", "fsdp", "losses"),
    *("tensor_parallel", "pipelining"),
}
_WHOLE = _STRATEGIES | {"checkpoint", "compiler"}
_TOP = _WHOLE | {"composition", "data", "launching", "planner", "reference", "report"}

ALLOWED: dict[str, frozenset[str]] = {
    **dict.fromkeys(_PURE, _PURE),
    "errors": frozenset(),
    "mesh": _PURE,
    "torch_internals": frozenset(),
    "launching": _COMM,
    "randomness": _PURE | {"torch_internals"},
    "comm": _COMM,
    "gradients": _COMM,
    # The head of a model may be split over axis tensor.
    "losses": _STRATEGY | {"tensor_parallel"},
    "data_parallel": _STRATEGY,
    "fsdp": _STRATEGY | {"data_parallel"},
    "tensor_parallel": _STRATEGY,
    # `ExpertParallel` is a style of `parallelize_module`, and makes DTensors as the others do.
    "expert_parallel": _STRATEGY | {"tensor_parallel"},
    # `gathered` of `tensor_parallel` puts parts together.
    "context_parallel": _STRATEGY | {"tensor_parallel"},
    "pipelining": _STRATEGY,
    "data": _COMM | {"randomness"},
    "compiler": _STRATEGIES,
    "checkpoint": _STRATEGIES,
    "composition": _WHOLE,
    "reference": _WHOLE,
    "planner": _PURE,
    "report": _PURE,
    "integrations": _STRATEGIES | {"checkpoint"},
    "transfer": _STRATEGIES | {"checkpoint"},
    "recipes": _TOP | {"integrations"},
    "doctor": _WHOLE | {"planner"},
    "cli": _TOP | {"doctor", "integrations", "recipes"},
    "__main__": frozenset({"cli"}),
    "testing": _TOP,
}

# The one way round the arrows: a file, and the lazy attribute of the package that it asks.
WAYS_ROUND = frozenset({("data_parallel/replicas/traced.py", "meshwright.compiler.MARKING")})

# The pure row and what stands on it alone start without torch, so that `plan` and `simulate` do.
TORCH_FREE = _PURE | {"planner", "report"}
# Of these rooms, the files that need it, which the others do not import.
WITH_TORCH = frozenset({"planner/predictions.py", "planner/rehearsed.py", "planner/traced.py"})

# Where communication may be touched: every other room goes through a Communicator. A simulated
# device is a backend of c10d.
C10D = (
    "torch.distributed",
    "torch._C._distributed_c10d",
    "torch.ops.c10d",
    "torch.ops._c10d_functional",
)
C10D_ROOMS = (
    "meshwright.comm",
    "meshwright.mesh",
    "meshwright.testing.simulated",
    "meshwright.torch_internals",
    "meshwright.checkpoint.exchange.dcp",  # the classes that its files are pickles of
)

# What Meshwright replaces. These appear in benchmarks and in parity tests, never in src.
PEERS = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed",
    "torch._inductor.fx_passes.ddp_fusion",
)

# The one file that says their names, and those of private modules inside of them: it puts ours in
# their place for programs that import them, and uses nothing of theirs.
NAMES_PEERS = frozenset({"integrations/torch_names.py"})

# What torch keeps private: dotted names with a part that begins with an underscore, and private
# names of its objects, also as strings. Other packages have these.
PRIVATE_ROOM = "torch_internals"
OF_OTHERS = frozenset(
    {"_apply_gate", "_can_record_outputs", "_init_weights", "_models", "_read_pyc"}
)
# Files of that room for these rooms alone: one is torch.distributed, one stands in for parts of
# torch, one loads the compiler.
PRIVATE_DOORS: dict[str, tuple[str, ...]] = {
    "meshwright.torch_internals.distributed": (
        "meshwright.checkpoint.exchange.dcp",
        "meshwright.comm",
        "meshwright.testing.simulated",
    ),
    "meshwright.torch_internals.simulation": ("meshwright.testing.simulated",),
    "meshwright.torch_internals.compile": (
        "meshwright.compiler",
        "meshwright.pipelining.splitting",
    ),
}

# Formats that run code when they are read, and the calls that use them underneath.
PICKLE = (
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch.load",
    "torch.save",
    "torch.distributed.all_gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object",
    "torch.distributed.recv_object_list",
    "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list",
)
PICKLE_ROOMS = frozenset({"launching"})
# Foreign formats, read weights only or with a list of the names that may be in them.
PICKLE_FILES = frozenset({"checkpoint/exchange/dcp.py", "checkpoint/exchange/torch_file.py"})

# Functions that make tensors of the default device, which is the user's. The models of one file are
# made like a user's own.
FACTORIES = frozenset(
    {"arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"}
    | {"linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range"}
    | {"scalar_tensor", "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csr_tensor"}
    | {"tensor", "tril_indices", "triu_indices", "zeros"}
)
ON_DEFAULT_DEVICE = frozenset({"recipes/language_model.py", "testing/models.py"})

# Classes whose subclasses nobody asks for by name.
UNIONS = frozenset({"ChunkedLayout", "Exposure", "FlatLayout", "Reduction"})

# Packages that may be missing: imported inside a function, or at the top of the rooms named below.
# The check of a GPU runs under its machine's own Python, which may lack the last two.
OPTIONAL = frozenset(
    {"accelerate", "hypothesis", "lightning", "pytest", "ray", "rich", "tensorboard"}
    | {"pydantic", "scipy", "transformers", "tyro"}
    | {"cloudpickle", "xxhash"}
)
OPTIONAL_ROOMS: dict[str, frozenset[str]] = {
    "cli": frozenset({"rich", "tyro"}),
    "recipes": frozenset({"rich", "tyro"}),
    "testing": frozenset({"pytest"}),
}

# The registry of a process, and what it has compiled, are the only mutable state of modules, but
# for caches of functions and the context of `fsdp.wrap`, which the rule does not look for.
STATE_FILES = frozenset({"comm/groups/registry.py", "compiler/marking.py"})

# Only the command line writes to the console with `print`.
CONSOLE_ROOM = "cli"

BANNED_WORDS = frozenset(
    {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
)
