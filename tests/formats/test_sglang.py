"""SGLang's sharded_state against what real SGLang's rank processes held (fixtures/sglang), and back again."""

import json

import pytest
from helpers.fixture_places import FIXTURES, HF, MODELS, config_of, patch_stored, ranks, read_reference, rules_of, stored

import reshard
from reshard.errors import CheckpointError, RequestError, UnsupportedError
from reshard.geometry.dtypes import BF16, F32, from_torch
from reshard.geometry.meshes import Parallel
from reshard.models.lookup import find_model
from reshard.serving.legality import check_degrees
from reshard.serving.ranks import placeholder_dtypes, rank_tensors

REFERENCES = sorted((FIXTURES / "sglang").glob("*/*.json"))
WITH_EXPERTS = ("mixtral-narrow", "qwen2_moe", "qwen3_moe-sparse", "deepseek_v2", "deepseek_v3")
SERVED = (*MODELS, "gemma2", "gpt2", "phi3", *WITH_EXPERTS)
READ_BACK = [(model, tp, 1) for model in SERVED for tp in (1, 8)] + [(model, tp, tp) for model in WITH_EXPERTS for tp in (2, 4)]

OF_REFERENCES = {tuple(json.loads(path.read_text())[key] for key in ("model", "tp", "ep")) for path in REFERENCES}


def plan(model, tp=1, ep=1, **options):
    return reshard.plan(HF / model, to="sglang", tp=tp, ep=ep, **options)


def test_there_are_references_for_every_model_and_degree():
    found = {(path.parent.name, path.stem) for path in REFERENCES}
    assert found >= {(model, f"tp{tp}") for model in SERVED for tp in (1, 2, 4, 8)}
    assert found >= {(model, degree) for model in WITH_EXPERTS for degree in ("tp2-ep2", "tp4-ep4")}


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_rank_holds_bit_by_bit_what_real_sglang_holds(reference, tmp_path):
    """And what was written is told from vLLM's files, and reads back: of one conversion."""
    expected = read_reference(reference)
    model, tp, ep = (expected[key] for key in ("model", "tp", "ep"))
    reshard.convert(plan(model, tp, ep), tmp_path / "out")
    assert ranks(tmp_path / "out") == expected["ranks"]
    if (model, tp, ep) in READ_BACK:
        reads_back(model, tp, ep, tmp_path / "out")


def reads_back(model, tp, ep, folder):
    proof = reshard.roundtrip(plan(model, tp, ep))
    assert proof.losses == () and proof.boxes >= proof.tensors
    opened = reshard.open(folder)
    assert opened.format == "sglang" and opened.index.facts.parallel == {"tp": tp, **({"ep": ep} if ep > 1 else {})}
    assert reshard.verify(HF / model, folder).equal


@pytest.mark.parametrize("model, tp, ep", [case for case in READ_BACK if case not in OF_REFERENCES])
def test_what_no_real_ranks_held_reads_back(model, tp, ep, tmp_path):
    reshard.convert(plan(model, tp, ep), tmp_path / "out")
    reads_back(model, tp, ep, tmp_path / "out")


@pytest.mark.parametrize("model", ["llama", "llama-tied", "qwen3", "mixtral-narrow", "qwen2_moe"])
def test_without_a_manifest_it_is_opened_as_an_older_vllms(model, tmp_path):
    reshard.convert(plan(model, 2), tmp_path / "out")
    (tmp_path / "out" / "reshard.json").write_text('{"format": "sgl')
    assert reshard.open(tmp_path / "out").format == "vllm"
    (tmp_path / "out" / "reshard.json").unlink()
    assert reshard.open(tmp_path / "out").format == "vllm"
    assert reshard.open(tmp_path / "out", format="sglang").format == "sglang"
    assert reshard.verify(HF / model, tmp_path / "out").equal


def test_vllms_own_is_still_vllms(tmp_path):
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2), tmp_path / "out")
    assert reshard.open(tmp_path / "out").format == "vllm"
    with pytest.raises(CheckpointError, match="knows no such key"):
        reshard.open(tmp_path / "out", format="sglang")


def test_the_degree_can_be_changed(tmp_path):
    reshard.convert(plan("mixtral-narrow", 4, 4), tmp_path / "a")
    reshard.convert(reshard.plan(tmp_path / "a", to="sglang", tp=2), tmp_path / "b")
    expected = read_reference(FIXTURES / "sglang" / "mixtral-narrow" / "tp2.json")
    assert ranks(tmp_path / "b") == expected["ranks"]


@pytest.mark.parametrize("tp", [3, 5, 6, 7, 16])
def test_an_illegal_degree_is_refused_with_the_legal_ones(tp):
    with pytest.raises(RequestError, match=r"Legal tensor-parallel sizes are 1, 2, 4, 8\."):
        plan("llama", tp)


def test_experts_that_do_not_come_out_even_are_refused():
    model = find_model(config_of("mixtral-6", head_dim=8))
    rules = rules_of("sglang", model)
    check_degrees(model, rules, Parallel(2, ep=2))
    with pytest.raises(RequestError, match="4 ranks do not divide its 6 experts"):
        check_degrees(model, rules, Parallel(4, ep=4))


@pytest.mark.parametrize("tp, rows", [(1, 128), (2, 64), (3, 64), (6, 64)])
def test_tables_are_padded_until_the_ranks_divide_them(tp, rows):
    """vLLM would refuse 3 and 6 ranks for these 128 rows."""
    model = find_model(config_of("llama", vocab_size=97, num_attention_heads=6, num_key_value_heads=6, intermediate_size=36))
    check_degrees(model, rules_of("sglang", model), Parallel(tp))
    held = {
        tensor.name: tensor.shape
        for tensor in rank_tensors(
            model, placeholder_dtypes(model, rules_of("sglang", model)), rules_of("sglang", model), Parallel(tp), 0, 0
        )
    }
    assert held["model.embed_tokens.weight"] == held["lm_head.weight"] == (rows, 32)


@pytest.mark.parametrize("model", ["mixtral-narrow", "qwen2_moe", "qwen3_moe-sparse"])
def test_classes_that_do_not_tie_have_both_tables(model):
    tied = find_model(config_of(model, tie_word_embeddings=True))
    held = {
        tensor.name: tensor.sections
        for tensor in rank_tensors(tied, placeholder_dtypes(tied, rules_of("sglang", tied)), rules_of("sglang", tied), Parallel(2), 1, 0)
    }
    assert held["lm_head.weight"] == held["model.embed_tokens.weight"] != ()


@pytest.mark.parametrize("model", ["gemma2", "gpt2"])
def test_classes_that_always_tie_refuse_a_head(model):
    with pytest.raises(RequestError, match="works as if tie_word_embeddings were true"):
        rules_of("sglang", find_model(config_of(model, tie_word_embeddings=False)))


@pytest.mark.parametrize(
    "model, options, why",
    [
        ("llama", {"pp": 2}, "split by tp, ep only"),
        ("llama-biased", {}, "has no slot for it, nor for 8 more"),
        ("mixtral", {}, "the config says 32"),
        ("qwen3_moe", {}, "layer 1 has none"),
        ("gpt_neox", {}, "no class"),
        ("llama", {"engine_version": "0.4.9"}, "oldest"),
        ("llama", {"engine_version": "latest"}, "a version such as"),
        ("llama", {"ep": 2, "tp": 2}, "no experts"),
    ],
)
def test_what_sglang_does_not_serve_is_refused(model, options, why):
    with pytest.raises(RequestError, match=why):
        reshard.plan(HF / model, to="sglang", **options)


def test_the_config_says_what_its_classes_ask_for(tmp_path):
    reshard.convert(plan("deepseek_v3"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["topk_method"], config["scoring_func"], config["moe_layer_freq"]) == ("noaux_tc", "sigmoid", 1)
    assert any("--disable-shared-experts-fusion" in note for note in plan("deepseek_v3").layout.notes)


@pytest.mark.parametrize("value", [1.0, -1.0, 0.1, 1 / 3, 2304**0.5, 3584**0.5, 1.00390625, 1.01171875, 65504.0, 1e-3])
@pytest.mark.parametrize("dtype", [BF16, F32, from_torch("float16", where="test")])
def test_a_constant_is_rounded_as_torch_rounds(value, dtype):
    import torch

    element = torch.tensor(value, dtype=torch.float64).to(getattr(torch, dtype.torch))
    assert dtype.encoded(value) == bytes(element.reshape(1).view(torch.uint8).tolist())


def test_gemmas_normalizer_is_in_the_models_type(tmp_path):
    reshard.convert(plan("gemma2", dtype="fp16"), tmp_path / "out")
    dtype, shape, data = stored(tmp_path / "out" / "model-rank-0-part-0.safetensors")["model.normalizer"]
    assert (dtype, shape, data) == ("F16", [], b"\x00\x44")  # 4, the root of its 16 features


def test_a_drifted_replica_is_found(tmp_path):
    reshard.convert(plan("llama", 8), tmp_path / "out")
    patch_stored(tmp_path / "out" / "model-rank-6-part-0.safetensors", "model.norm.weight", 0)
    with pytest.raises(CheckpointError, match="model-rank-6"):
        reshard.verify(HF / "llama", tmp_path / "out")


def test_a_declared_model_whose_class_was_not_compared_is_refused():
    model = find_model(json.loads((FIXTURES / "vllm_declared" / "qwen3_next.json").read_text())["config"])
    with pytest.raises(UnsupportedError, match="qwen3_next model was not compared"):
        rules_of("sglang", model)
