"""Folders of tiny models that vLLM serves over HTTP: a fixture with a tokenizer, longer positions, and other weights.

    python tiny_models.py SOURCE TARGET TURNS [STEP]

Each weight's rows are rolled TURNS times, and every STEP-th element of it is made another one.

Run with an interpreter that has tokenizers and safetensors.
"""

import json
import sys
from pathlib import Path

POSITIONS = 512  # more than a cache block of a CPU, which has 128


def make(source: Path, target: Path, turns: int, step: int | None = None) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": POSITIONS}))
    weights = load_file(source / "model.safetensors")
    rolled = {name: torch.roll(weight, turns, 0).contiguous() for name, weight in weights.items()}
    for weight in rolled.values() if step else ():
        weight.view(-1)[::step] += 1
    save_file(rolled, target / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(target / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (target / "tokenizer_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
