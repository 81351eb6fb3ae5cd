"""Runs in an environment with PEFT: adapts bases, merges and loads adapters, and compares folders of weights, as check.py asks.

One process does all of it, because importing PEFT takes seconds. A request is a line of JSON on stdin, ["merge", arguments ...]; the answer
is a line on stdout: {"result": ...} or {"error": ...}.

    merge BASE SETTINGS FOLDER   adapts a base, and saves the adapter, a trainer's state dict and PEFT's own merge in float32; the answer is
                                 the base. BASE: a fixture, or the JSON of a config; SETTINGS: those of LoraConfig, and
                                 save_embedding_layers of the save
    merge_exactly CONFIG SETTINGS FOLDER   the same of a base in float32 with that config
    combine BASE WEIGHTS FOLDER  makes an adapter for each weight, and what PEFT's add_weighted_adapter makes of them: FOLDER/0, 1, ..., and
                                 FOLDER/cat/cat, FOLDER/linear/linear. The second one is in bfloat16
    distance OURS THEIRS         the largest difference of two folders of weights, in parts of the largest element of its tensor
    load BASE ADAPTER            loads an adapter into its base; an error if PEFT misses or ignores a tensor
    compare OURS THEIRS          the answer is the number of tensors, of elements, of elements that differ by one unit in the last place,
                                 and of those that differ by more
"""

import contextlib
import json
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


def base_of(text: str, folder: Path) -> str:
    """The directory of the base: the fixture itself, or a model of random weights."""
    if not text.startswith("{"):
        return text
    settings = json.loads(text)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    model.save_pretrained(folder / "base")
    return str(folder / "base")


def merge(base: str, settings: dict, into: str) -> str:
    folder = Path(into)
    base = base_of(base, folder)
    embeddings = settings.pop("save_embedding_layers", False)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.1 + ("magnitude" in name))
    model.save_pretrained(folder / "adapter", save_embedding_layers=embeddings)
    torch.save(model.state_dict(), folder / "trained.pt")
    full = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(full, folder / "adapter").float().merge_and_unload().save_pretrained(folder / "merged")
    return base


def merge_exactly(config: dict, settings: dict, into: str) -> str:
    """As `merge`, of a base in float32, whose merge is not rounded afterwards."""
    folder = Path(into)
    torch.manual_seed(3)
    of_class = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    base = of_class.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    base.save_pretrained(folder / "base")
    model = get_peft_model(of_class.from_pretrained(folder / "base", dtype=torch.float32), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder / "adapter")
    full = of_class.from_pretrained(folder / "base", dtype=torch.float32)
    PeftModel.from_pretrained(full, folder / "adapter").merge_and_unload().save_pretrained(folder / "merged")
    return str(folder / "base")


def combine(base: str, weights: list[float], into: str) -> None:
    modules = (["q_proj", "v_proj"], ["v_proj", "down_proj"], ["v_proj", "embed_tokens"])
    for number, own in enumerate(modules[: len(weights)]):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        settings = LoraConfig(r=4, lora_alpha=5 + number, use_rslora=number == 1, target_modules=own, task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape) * 0.3)
        model.to(torch.bfloat16 if number == 1 else torch.float32).save_pretrained(f"{into}/{number}", save_embedding_layers=False)
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), f"{into}/0", adapter_name="of-0")
    names = [f"of-{number}" for number in range(len(weights))]  # PEFT takes an adapter's name out of "layers.0" as well
    for number, name in enumerate(names[1:], 1):
        whole.load_adapter(f"{into}/{number}", adapter_name=name)
    for how in ("cat", "linear"):
        whole.add_weighted_adapter(names, weights, how, combination_type=how)
        whole.save_pretrained(f"{into}/{how}", selected_adapters=[how], save_embedding_layers=False)


def distance(ours: str, theirs: str) -> float:
    """The largest difference, in parts of the largest element of its tensor. Experts may be stored with exchanged axes."""
    found, wanted = weights(ours), weights(theirs)
    assert found and found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:5]
    largest = 0.0
    for name, tensor in found.items():
        own = tensor if tensor.shape == wanted[name].shape else tensor.transpose(-1, -2)
        largest = max(largest, float((own - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-30)))
    return largest


def load(base: str, adapter: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match.*")  # said of PEFT's own adapters of experts, too
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert any("lora_" in name for name, _ in model.named_parameters())


def weights(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(path).items()}


def compare(ours: str, theirs: str) -> tuple[int, int, int, int]:
    found, wanted = weights(ours), weights(theirs)
    assert found and found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:5]
    one = more = elements = 0
    for name, tensor in found.items():
        expected = wanted[name].to(tensor.dtype)
        assert tensor.shape == expected.shape, name
        if tensor.dtype == torch.bfloat16:
            steps = (tensor.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        else:
            steps = 2 * (tensor != expected).int()
        one, more, elements = one + int((steps == 1).sum()), more + int((steps > 1).sum()), elements + tensor.numel()
    return len(found), elements, one, more


REQUESTS = {"merge": merge, "merge_exactly": merge_exactly, "combine": combine, "distance": distance, "load": load, "compare": compare}

if __name__ == "__main__":
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                answer = {"result": REQUESTS[name](*arguments)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[-400:]}
        print(json.dumps(answer), flush=True)
