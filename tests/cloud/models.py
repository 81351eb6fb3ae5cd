"""Made-up models for stores: of any size, in as many files as a test needs."""

import json

import numpy as np
from safetensors.numpy import save_file

import reshard


def write_hf(folder, *, layers=2, hidden=64, feed_forward=128, vocabulary=128, files_per_layer=1):
    """A llama in Hugging Face's layout, one file for each group of tensors; the folder."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": feed_forward,
        "num_attention_heads": hidden // 4, "num_key_value_heads": hidden // 4, "num_hidden_layers": layers, "vocab_size": vocabulary,
        "head_dim": 4, "rms_norm_eps": 1e-5, "torch_dtype": "float32", "tie_word_embeddings": False, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    groups = [{"model.embed_tokens.weight": (vocabulary, hidden)}, {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        attention = {f"{at}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"} | {at + "input_layernorm.weight": (hidden,)}
        mlp = {f"{at}mlp.{name}_proj.weight": (feed_forward, hidden) for name in ("gate", "up")}
        mlp |= {at + "mlp.down_proj.weight": (hidden, feed_forward), at + "post_attention_layernorm.weight": (hidden,)}
        groups += [attention, mlp] if files_per_layer == 2 else [attention | mlp]
    index = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({key: random.standard_normal(shape, np.float32) for key, shape in group.items()}, folder / name)
        index |= dict.fromkeys(group, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def converted(source, folder, **options):
    """The same model in another format; the folder, which may be a URL."""
    reshard.convert(reshard.plan(reshard.open(source), **options), folder)
    return folder


def content(folder):
    """Path -> bytes of the files of a conversion, without the manifest, which names paths and times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "reshard.json"
    }


def content_in(server, bucket, prefix):
    """The same of a folder in our server."""
    keys = [key for key in server.keys(bucket, prefix + "/") if not key.endswith("/reshard.json")]
    return {key.removeprefix(prefix + "/"): server.content(bucket, key) for key in keys}
