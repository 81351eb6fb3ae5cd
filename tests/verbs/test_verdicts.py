"""A verdict is as good as the cases in which it is bad: each test shows both."""

import json
import sys

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard
from helpers.slime_deltas import folder_of, load_folder

import reshard as library
from reshard.errors import CheckpointError, RequestError
from reshard.models.lookup import find_model

sys.path.insert(0, str(FIXTURES))
import named_weights

KV = FIXTURES / "hf_fp8" / "llama-ct-kv"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def kv(tmp_path):
    """An FP8 model whose scales of the KV cache are bfloat16, as llm-compressor writes them; vLLM holds them as float32."""
    stored = load_folder(KV)
    for name, (dtype, shape, data) in stored.items():
        if name.endswith(("k_scale", "v_scale")):
            assert dtype == "F32" and "self_attn" in name
            stored[name] = "BF16", shape, np.frombuffer(data, "<u4").astype("<u4").view("<u2")[1::2].tobytes()
    folder_of(tmp_path / "kv", stored, KV)
    return tmp_path / "kv"


def test_what_an_engine_holds_in_a_type_of_its_own_is_equal_with_a_note(kv, tmp_path):
    out = tmp_path / "out"
    assert reshard("convert", kv, out, "--to", "vllm", "--tp", 2).code == 0
    for pair in ((kv, out), (out, kv)):
        done = reshard("verify", *pair)
        assert done.code == 0 and "note      compared after a cast to F32, in which the engine holds them: 2 tensors" in done.out, done.out
    stored = load_folder(kv)
    name = "model.layers.0.self_attn.v_scale"
    dtype, shape, data = stored[name]
    stored[name] = dtype, shape, bytes([data[0] ^ 1, *data[1:]])
    folder_of(tmp_path / "other", stored, kv)
    for pair in ((tmp_path / "other", out), (out, tmp_path / "other")):
        done = reshard("verify", *pair)
        assert done.code == 1 and f"{name}  values" in done.out, done.out
    cast = reshard("verify", kv, FIXTURES / "hf_fp8" / "llama-ct-kv")
    assert cast.code == 1 and cast.out.count("  dtype  ") == 2, "of two folders none is an engine's"


def test_a_table_of_experts_is_held_in_32_bits_as_vllm_holds_it(tmp_path):
    """deepseek_v4's tid2eid is int64 in transformers 5, int32 in published files and in vLLM 0.32 (models/deepseek_v4/cpu/model.py)."""
    config = json.loads((FIXTURES / "vllm_declared" / "deepseek_v4.json").read_text())["config"]
    shapes = {weight.name: weight.shape for weight in find_model(config).weights.values() if not weight.optional}
    name = "layers.1.ffn.gate.tid2eid"
    for bits in (64, 32):
        named_weights.write(tmp_path / f"int{bits}", config, shapes, types={r".*\.tid2eid": f"I{bits}"})
        done = reshard("convert", tmp_path / f"int{bits}", tmp_path / f"ranks{bits}", "--to", "vllm", "--tp", 2)
        assert done.code == 0, done.err
    stored = [value for key, value in load_folder(tmp_path / "ranks64").items() if key.endswith("1.ffn.experts.gate.tid2eid")]
    assert stored == [load_folder(tmp_path / "int32")[name]] and stored[0][0] == "I32"
    assert library.fingerprint(tmp_path / "ranks64") == library.fingerprint(tmp_path / "ranks32")
    for pair in ((tmp_path / "int64", tmp_path / "ranks64"), (tmp_path / "ranks64", tmp_path / "int64")):
        for command in ("verify", "diff"):
            done = reshard(command, *pair)
            assert done.code == 0 and "compared after a cast to I32, in which the engine holds them: 2 tensors" in done.out, done.out
        assert reshard("explain", *pair).code == 0
    two_folders = reshard("verify", tmp_path / "int64", tmp_path / "int32")
    assert two_folders.code == 1 and two_folders.out.count("  dtype  ") == 2, "of two folders none is an engine's"
    for value, code in ((9, 1), (1 << 40, 3)):
        other = load_folder(tmp_path / "int64")
        dtype, shape, data = other[name]
        other[name] = dtype, shape, value.to_bytes(8, "little") + data[8:]
        folder_of(tmp_path / f"other{value}", other, tmp_path / "int64")
        done = reshard("verify", tmp_path / f"other{value}", tmp_path / "ranks64")
        assert done.code == code and (f"{name}  values" in done.out or "holds -2147483648 to 2147483647" in done.err), done.out + done.err
    refused = reshard("convert", tmp_path / f"other{1 << 40}", tmp_path / "none", "--to", "vllm", "--tp", 2)
    assert refused.code == 3 and "1099511627776" in refused.err, "no value is changed without a word"


@pytest.mark.parametrize(
    "key", ["reshard_result_fingerprint", "reshard_digests", "checksum_format", "checksum", "reshard_base_fingerprint"]
)
def test_a_delta_whose_record_was_changed_is_refused_though_its_other_digests_agree(key, tmp_path):
    run, delta = FIXTURES / "delta", tmp_path / "delta"
    library.delta(run / "step-100", run / "step-200", delta)
    library.apply(run / "step-100", delta, tmp_path / "whole", to="hf")
    path = next(delta.glob("*.safetensors")) if key == "checksum" else delta / INDEX
    data = path.read_bytes()
    if key == "checksum":
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        first = next(iter(header["__metadata__"].values()))
        data = data.replace(first.encode(), (first[:-1] + ("0" if first[-1] != "0" else "1")).encode())
    else:
        document = json.loads(data)
        value = document["metadata"][key]
        if key == "checksum_format":
            document["metadata"][key] = "adler32" if value != "adler32" else "blake3"
        elif isinstance(value, dict):
            name = next(iter(value))
            value[name] = value[name][:-1] + ("0" if value[name][-1] != "0" else "1")
        else:
            document["metadata"][key] = value[:-1] + ("0" if value[-1] != "0" else "1")
        data = json.dumps(document).encode()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        library.apply(run / "step-100", delta, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("has_bias", [False, True])
def test_granitemoe_with_biases_in_its_attention_is_refused_as_its_class_has_none(has_bias):
    from reshard.models.lookup import find_model
    from reshard.serving.legality import check_served

    model = find_model({"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"], "attention_bias": has_bias, **SIZES})
    rules = model.quirks_of("vllm")
    if not has_bias:
        check_served(model, rules)
        return
    with pytest.raises(RequestError, match="has no biases in its attention"):
        check_served(model, rules)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("granitemoehybrid", "mamba_conv_bias"),
        ("falcon_h1", "mamba_conv_bias"),
        ("mamba2-one", "use_conv_bias"),
        ("zamba2-one", "use_conv_bias"),
    ],
)
def test_a_mixer_without_a_bias_of_its_convolution_is_not_cut_where_its_class_cannot_be_built(name, key):
    """vLLM 0.32, model_executor/layers/mamba/mamba_mixer2.py: where the ranks do not divide the groups, the class sets an attribute of
    conv1d.bias, which is None ("'NoneType' object has no attribute 'weight_loader'")."""
    from reshard.adapter import registry
    from reshard.geometry.meshes import Parallel
    from reshard.plans.layout import Target
    from reshard.serving.legality import check_degrees

    config = json.loads((FIXTURES / "vllm_declared" / f"{name}.json").read_text())["config"]

    def check(tp, **changes):
        model, parallel = find_model({**config, **changes}), Parallel(tp=tp)
        check_degrees(model, registry.named("vllm").rules(model, Target("vllm", parallel)), parallel)

    check(2, **{key: True})
    check(1, **{key: False})
    with pytest.raises(RequestError, match="its convolution has no bias"):
        check(2, **{key: False})
    groups = "n_groups" if name == "mamba2-one" else "mamba_ngroups" if name == "zamba2-one" else "mamba_n_groups"
    check(2, **{key: False, groups: 2})


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}  # fmt: skip


@pytest.mark.parametrize("address", ["http://127.0.0.1:8124/v1", "http://127.0.0.1:8124/v1/", "http://127.0.0.1:8124"])
def test_the_address_of_openais_api_is_that_of_the_server(address):
    from reshard.storage.server import Server, is_server

    assert is_server(address) and Server.at(address).address == "http://127.0.0.1:8124"
    assert not is_server("http://127.0.0.1:8124/models/v1"), "a folder of a web server is none"
