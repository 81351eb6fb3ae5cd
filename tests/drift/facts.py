"""What an installed framework's classes ask for and write, as plain values. Run in the framework's environment: python facts.py FRAMEWORK

transformers    parameters of each model of fixtures/hf, in order, with shapes (on the meta device)
torch           state and settings of its optimizers, members of a torch.save file, fields of the metadata of torch.distributed.checkpoint
megatron-core   keys and global shapes of the sharded state dict of small models
vllm, sglang    model classes, and the linear layers that each fuses (read from the source, which is not run)

Prints {"version": "..", "facts": {group: {name: value}}}.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import io
import json
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
Facts = dict[str, dict[str, object]]


def of_transformers() -> Facts:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    facts: Facts = {}
    for path in sorted((FIXTURES / "hf").glob("*/config.json")):
        config = AutoConfig.from_pretrained(path.parent)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        named = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
        facts[path.parent.name] = {name: [number, shape] for number, (name, shape) in enumerate(named)}
    return facts


def of_torch() -> Facts:
    import torch
    import torch.distributed.checkpoint as dcp

    facts: Facts = {}
    for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Adafactor", "RMSprop", "Muon"):
        if (optimizer_class := getattr(torch.optim, name, None)) is None:
            continue
        parameter = torch.nn.Parameter(torch.ones(3, 2))
        parameter.grad = torch.ones_like(parameter)
        optimizer = optimizer_class([parameter], lr=0.1)
        optimizer.step()
        state = {
            key: list(value.shape) if torch.is_tensor(value) else type(value).__name__ for key, value in optimizer.state[parameter].items()
        }
        facts[name] = {"state": state, "settings": sorted(optimizer.state_dict()["param_groups"][0])}
    file = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, file)
    facts["torch.save"] = {"members": [name.partition("/")[2] for name in zipfile.ZipFile(file).namelist()]}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": {"weight": torch.ones(2)}, "step": 1}, checkpoint_id=folder, no_dist=True)
        metadata = pickle.loads((Path(folder) / ".metadata").read_bytes())
        facts["dcp"] = {
            "files": sorted(path.name for path in Path(folder).iterdir()),
            "fields": sorted(vars(metadata)),
            "version": metadata.version,
            "tensor": sorted(vars(metadata.state_dict_metadata["model.weight"])),
            "storage": sorted({field for info in metadata.storage_data.values() for field in vars(info)}),
        }
    return facts


def of_megatron() -> Facts:
    sys.path[:0] = [str(FIXTURES / "megatron"), str(FIXTURES)]
    import run
    from makers import load

    legacy = load("megatron")
    facts: Facts = {}
    for model, sizes in (
        ("llama", legacy.SMALL),
        ("qwen2", legacy.QWEN2),
        ("mixtral", {}),
        ("qwen2_moe", {}),
        ("deepseek_v3", legacy.DEEPSEEK),
    ):
        ranks = run._Ranks(run.Run(model, run.Layout(), sizes=sizes | ({} if model == "deepseek_v3" else legacy.ONE)))
        (chunk,) = ranks.chunks("fp32")
        sharded = chunk.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": run.mpu.get_data_parallel_group()})
        facts[model] = {tensor.key: list(getattr(tensor, "global_shape", ())) for tensor in _flat(sharded)}
        run.mpu.destroy_model_parallel()
    return facts


def _flat(sharded: object) -> Iterator[object]:
    for value in sharded.values():
        yield from _flat(value) if isinstance(value, dict) else (value,)


def of_engine(package: str, models: str) -> Facts:
    """The classes in the files of an engine's models: what each fuses, and of which class it is."""
    (root,) = importlib.util.find_spec(package).submodule_search_locations
    facts: Facts = {}
    for path in sorted((Path(root) / models).glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.startswith(("_", "Test")) is False:
                told = {
                    target.id: node_of(each.value)
                    for each in node.body
                    if isinstance(each, ast.Assign)
                    for target in each.targets
                    if isinstance(target, ast.Name) and target.id in ("packed_modules_mapping", "hf_to_vllm_mapper")
                }
                if told or "For" in node.name:
                    facts.setdefault(path.stem, {})[node.name] = told
    return facts


def node_of(node: ast.expr) -> object:
    """The value of a literal; the source of anything else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


FRAMEWORKS = {
    "transformers": of_transformers,
    "torch": of_torch,
    "megatron-core": of_megatron,
    "vllm": lambda: of_engine("vllm", "model_executor/models"),
    "sglang": lambda: of_engine("sglang", "srt/models"),
}


def version(framework: str) -> str:
    """The version of an installed distribution, under any of its names."""
    for name in (framework, f"{framework}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    facts = FRAMEWORKS[sys.argv[1]]()
    print(json.dumps({"version": version(sys.argv[1]), "facts": facts}))
