"""Heads against transformers: names and shapes of the classes that classify, and of those without a head, for every declared type.

    python tests/serving/heads.py
    python tests/serving/heads.py ANSWER      (in the environment of tests/serving/requirements.txt)

The first starts the second in vLLM's environment, which makes each class on the device `meta`. The exit code is 1 if a head differs, or if
names differ by more than the experts that transformers 5 fuses in memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("RESHARD_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
SUFFIXES = ("ForSequenceClassification", "ForTokenClassification", "Model")
HEADS = ("score", "classifier", "lm_head", "embed_out")
LABELS = 3


def configs() -> dict[str, dict[str, Any]]:
    """The config of one small model of each declared type, by model type."""
    paths = [*ROOT.glob("fixtures/hf/*/config.json"), *sorted(ROOT.glob("fixtures/vllm_declared/*.json"))]
    documents = [json.loads(path.read_text()) for path in paths]
    found = [document.get("config", document) for document in documents]
    return {
        config["model_type"]: config for config in reversed(found) if config.get("architectures") and "quantization_config" not in config
    }


def made_by_transformers() -> dict[str, Any]:
    """Class -> its model type, and the shapes of its tensors by name."""
    import torch
    import transformers

    made: dict[str, Any] = {}
    for model_type, config in configs().items():
        stem = re.sub("ForCausalLM$|LMHeadModel$|ForConditionalGeneration$", "", config["architectures"][0])
        keys = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        for cls in (getattr(transformers, stem + suffix, None) for suffix in SUFFIXES):
            if cls is None or model_type not in transformers.CONFIG_MAPPING:
                continue
            try:
                with torch.device("meta"):
                    model = cls(transformers.CONFIG_MAPPING[model_type](**keys, num_labels=LABELS))
            except Exception as error:  # sizes of the row that this class does not take
                print(f"{cls.__name__}: not made: {error}"[:120], file=sys.stderr)
                continue
            made[cls.__name__] = model_type, {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    return made


def differing(named: str, config: dict[str, Any], theirs: dict[str, list[int]]) -> str | None:
    """How a class differs from what is read of it; None if its head is the same."""
    from reshard.models.lookup import find_model

    stated = {**config, "architectures": [named], "num_labels": LABELS}
    model = find_model(stated, stored={name: tuple(shape) for name, shape in theirs.items()})
    if model is None:
        return "no model"
    ours = {name: list(weight.shape) for name, weight in model.weights.items()}
    heads = [{name: shape for name, shape in names.items() if name.startswith(HEADS)} for names in (ours, theirs)]
    return None if heads[0] == heads[1] else f"{heads[0]} here, {heads[1]} in transformers"


def main() -> int:
    """Make, or compare."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(made_by_transformers()))
        return 0
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([PYTHON, __file__, f"{work}/made.json"], check=True)
        made = json.loads(Path(f"{work}/made.json").read_text())
    known, wrong = configs(), 0
    for named, (model_type, theirs) in made.items():
        if problem := differing(named, known[model_type], theirs):
            print(f"{named}: {problem}")
            wrong += named not in NOT_OF_LANGUAGE
    print(f"{len(made)} classes, {wrong} differ")
    return int(wrong > 0 or len(made) < 150)


# Classes of aligners, whose heads have the width of another part.
NOT_OF_LANGUAGE = ("Qwen3ASRForTokenClassification",)

if __name__ == "__main__":
    sys.exit(main())
