"""Runs in an environment with PEFT: adapts a base, and saves the adapter, a trainer's state dict and PEFT's own merge in float32.

python merge.py BASE SETTINGS FOLDER     BASE: a fixture, or the JSON of a config; SETTINGS: the JSON of LoraConfig's

python merge.py --load BASE ADAPTER      loads an adapter into its base; fails if PEFT misses or ignores a tensor
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM


def base_of(text: str, folder: Path) -> str:
    """The directory of the base: the fixture itself, or a model of random weights."""
    if not text.startswith("{"):
        return text
    settings = json.loads(text)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    model.save_pretrained(folder / "base")
    return str(folder / "base")


def merge(base: str, settings: dict, folder: Path) -> None:
    base = base_of(base, folder)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape) * 0.1 + ("magnitude" in name))
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    torch.save(model.state_dict(), folder / "trained.pt")
    full = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(full, folder / "adapter").float().merge_and_unload().save_pretrained(folder / "merged")
    (folder / "base.txt").write_text(base)


def load(base: str, adapter: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert any("lora_" in name for name, _ in model.named_parameters())


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        load(*sys.argv[2:])
    else:
        merge(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
