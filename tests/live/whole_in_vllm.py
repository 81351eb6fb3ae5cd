"""Whole tensors for the loader of real vLLM, in one process, in vLLM's environment: python whole_in_vllm.py OLD NEW

OLD, NEW: folders of a llama. Prints a line for each check: CHECK, whether it passed, what was checked, and a detail, with tabs between.
"""

import sys
import tempfile
from pathlib import Path

import torch
from reshard.plugins.weight_transfer.vllm import install, load_form  # noqa: TID251  # the parts of a door are checked
from reshard.plugins.weight_transfer.vllm_loader import check_whole  # noqa: TID251
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import get_model

from reshard.errors import RequestError
from reshard.geometry.dtypes import from_torch
from reshard.live.plan.schedule import HeldTensor

OLD, NEW = map(Path, sys.argv[1:3])
DOWN = "down_proj"


def config(folder):
    return EngineArgs(model=str(folder), enforce_eager=True, max_model_len=128, skip_tokenizer_init=True).create_engine_config()


def loaded(folder):
    own = config(folder)
    with set_current_vllm_config(own):
        return get_model(vllm_config=own), own


def outputs(model):
    """What its linear layers compute, and its parameters: a CPU packs weights where nobody sees them."""
    torch.manual_seed(0)
    found = {f"parameter {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            found[name] = layer(torch.randn(3, layer.input_size, dtype=torch.bfloat16))[0]
    return found


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def held(weights):
    return [HeldTensor(name, from_torch(str(tensor.dtype), where=name), tuple(tensor.shape), ()) for name, tensor in weights.items()]


def in_load_form(model, weights):
    """The load form of one rank, without down_proj."""
    found = {}
    for (name, *_), kept in load_form(model)[0]:
        for fused, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            if fused in name:
                found[name] = torch.cat([weights[name.replace(fused, f"{part}_proj")] for part in parts])
        if name not in found and DOWN not in name:
            weight = weights[name]
            found[name] = torch.cat([weight, weight.new_zeros(len(kept) - len(weight), *weight.shape[1:])])
    return found


def tell(passed, what, detail=""):
    print("CHECK", passed, what, " ".join(str(detail).split())[:500], sep="\t", flush=True)


def refused(model, what, words, weights, planned=()):
    try:
        check_whole(model, load_form(model)[0], held(weights), planned)
        tell(False, f"refused: {what}")
    except RequestError as error:
        tell(words in str(error) and "Nothing was sent" in str(error), f"refused: {what}", error)


def main():
    torch.accelerator.empty_cache = lambda: None  # vLLM's workers on a CPU replace it
    with set_current_vllm_config(config(OLD)):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
        initialize_model_parallel(1, 1)
    (first, first_config), (other, other_config) = loaded(OLD), loaded(OLD)
    expected, before, weights = outputs(loaded(NEW)[0]), outputs(first), load_file(NEW / "model.safetensors")
    check_whole(first, load_form(first)[0], held(weights), ())
    tell(same(outputs(first), before) and not same(before, expected), "asking the loader changes nothing")
    with set_current_vllm_config(first_config):
        install(first, first_config.model_config, {}, weights)
    tell(same(outputs(first), expected), "all weights whole: the layers compute what those of the new weights do")
    some, planned = {name: tensor for name, tensor in weights.items() if DOWN in name}, in_load_form(other, weights)
    check_whole(other, load_form(other)[0], held(some), planned)
    with set_current_vllm_config(other_config):
        install(other, other_config.model_config, planned, some)
    tell(same(outputs(other), expected), "some weights whole: the layers compute what those of the new weights do")
    refused(first, "another shape", "down_proj", {name: tensor[:-1] if DOWN in name else tensor for name, tensor in weights.items()})
    refused(first, "an unknown name", "nobody", {**weights, "model.layers.0.nobody.weight": torch.zeros(2, 2)})
    refused(first, "a part of a fused weight lacks", "qkv_proj", {name: tensor for name, tensor in weights.items() if "k_proj" not in name})
    refused(first, "a weight lacks", DOWN, {name: tensor for name, tensor in weights.items() if DOWN not in name})
    refused(first, "planned and whole", "as well", weights, planned)
    tell(same(outputs(first), expected), "refusals change nothing")


if __name__ == "__main__":
    main()
