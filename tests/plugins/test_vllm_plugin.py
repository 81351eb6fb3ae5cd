"""vLLM's load format `reshard`, as far as it goes without vLLM; tests/serving runs it in vLLM's own processes."""

import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch
from helpers.fixture_places import DCP, FIXTURES, FSDP, HF, open_case

import reshard as library
from reshard.errors import CheckpointError, RequestError

(POINT,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "reshard")
plugin = sys.modules[POINT.load().__module__]


def rank_view(source="fsdp2", **options):
    return open_case(DCP / source).view(to="vllm", **{"tp": 2, "rank": 1, **options})


def parameters_like(view, dtype=None):
    """Memory as an engine allocates it, filled with what must not stay."""
    found = {}
    for name, held in view.items():
        own = getattr(torch, held.dtype.torch)
        found[name] = torch.full(held.shape, 7.0, dtype=dtype or own if own != torch.float32 else own)
    return found


def bits(parameter):
    return parameter.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("source", [DCP / "fsdp2", FIXTURES / "deepspeed" / "z3-bf16", FIXTURES / "megatron" / "llama-tp2-pp2-dp2"])
def test_parameters_are_filled_with_the_views_bits_in_place(source):
    view = open_case(source).view(to="vllm", tp=2, rank=1)
    parameters = parameters_like(view)
    before = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    plugin.fill(parameters, view, threads=3)
    assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == before
    for name, parameter in parameters.items():
        assert bits(parameter).equal(bits(view[name].torch()))


def test_masters_are_cast_to_the_parameters_type_as_torch_casts_them():
    view = open_case(FIXTURES / "deepspeed" / "z3-bf16").view(to="vllm", tp=2, rank=1)
    parameters = parameters_like(view, torch.bfloat16)
    plugin.fill(parameters, view, threads=1)
    for name, parameter in parameters.items():
        assert parameter.equal(view[name].torch().to(parameter.dtype))


def test_a_parameter_of_other_strides_is_filled_too():
    view = rank_view()
    name = "model.layers.0.self_attn.o_proj.weight"
    rows, columns = view[name].shape
    transposed = torch.empty(columns, rows, dtype=torch.bfloat16).t()
    view[name].read_into(transposed)
    assert transposed.equal(view[name].torch())


def test_a_parameter_inside_a_larger_memory_touches_nothing_else():
    view = rank_view()
    name = "model.layers.0.self_attn.qkv_proj.weight"
    memory = torch.full((view[name].nbytes // 2 + 20,), 7.0, dtype=torch.bfloat16)
    view[name].read_into(memory[10:-10].view(view[name].shape))
    assert memory[10:-10].view(view[name].shape).equal(view[name].torch())
    assert (memory[:10] == 7).all() and (memory[-10:] == 7).all()


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda p: p.pop("model.layers.0.self_attn.o_proj.weight"), "the layout has this tensor, and 0 more"),
        (lambda p: p.update({"model.layers.0.extra.weight": torch.empty(2)}), "vLLM has this parameter, and 0 more"),
        (lambda p: p.update({"model.norm.weight": torch.empty(31, dtype=torch.bfloat16)}), r"as \[32\], vLLM's is \[31\]"),
        (lambda p: p.update({"model.norm.weight": torch.empty(32, 1, dtype=torch.bfloat16)}), r"as \[32\], vLLM's is \[32, 1\]"),
        (lambda p: p.update({"model.norm.weight": torch.empty(32, dtype=torch.int16)}), "as BF16, vLLM as I16"),
        (lambda p: p.update({"model.norm.weight": torch.empty(32, dtype=torch.float8_e4m3fn)}), "as BF16, vLLM as F8_E4M3"),
        (lambda p: p.update({"model.norm.weight": torch.empty(32, dtype=torch.bfloat16, device="meta")}), "not in memory"),
        (lambda p: p.update({"model.layers.0.self_attn.attn._k_scale": torch.empty((), dtype=torch.bfloat16)}), "as F32, vLLM as BF16"),
    ],
    ids=["a tensor too many", "a parameter too many", "shorter", "an axis more", "integers", "fp8", "meta", "a scale of another type"],
)
def test_what_is_not_just_the_layout_is_refused_before_anything_is_read(change, told):
    view = rank_view()
    parameters = parameters_like(view)
    change(parameters)
    with pytest.raises(RequestError, match=f"(?s){told}.*whole_tensors"):
        plugin.fill(parameters, view, threads=1)
    assert all((parameter == 7).all() for name, parameter in parameters.items() if name == "model.embed_tokens.weight")


def test_a_table_that_vllm_has_untied_is_read_under_both_names():
    view = open_case("fsdp2-tied").view(to="vllm")
    tied = ("lm_head.weight", "model.embed_tokens.weight")
    assert len(set(tied) & set(view)) == 1
    parameters = parameters_like(view)
    parameters |= {name: torch.zeros(view["lm_head.weight"].shape, dtype=torch.bfloat16) for name in tied}
    with pytest.raises(RequestError, match="vLLM has this parameter"):
        plugin.fill(parameters, view, threads=1)
    plugin.fill(parameters, view, threads=1, tied=tied)
    assert parameters[tied[0]].equal(parameters[tied[1]]) and parameters[tied[0]].any()


def test_what_was_not_loaded_is_known_by_the_nan_that_was_there_before():
    loaded = {"a": torch.zeros(5, 7), "b": torch.zeros(3, dtype=torch.bfloat16), "c": torch.zeros(4, dtype=torch.float16)}
    plugin.poison(loaded.values())
    assert all(parameter.isnan().all() for parameter in loaded.values())
    with pytest.raises(CheckpointError, match="a: it was not loaded, or not all of it, nor were 2 more"):
        plugin.check_loaded(loaded)
    loaded["a"].fill_(1), loaded["b"].fill_(float("nan")), loaded["c"][:3].fill_(0)
    with pytest.raises(CheckpointError, match="c: it was not loaded, or not all of it, nor were 0 more"):
        plugin.check_loaded(loaded)
    loaded["c"][3] = 0
    plugin.check_loaded(loaded)


def test_what_has_no_nan_is_left_as_it_is():
    others = [torch.full((3,), 5, dtype=torch.int32), torch.ones(3, dtype=torch.float8_e4m3fn), torch.ones(3, device="meta")]
    plugin.poison(others)
    assert others[0].tolist() == [5, 5, 5] and others[1].float().tolist() == [1, 1, 1]
    plugin.check_loaded(dict(enumerate(others)))


@pytest.mark.parametrize(
    "given, told",
    [
        (
            {"path": "x"},
            "names 'path'.*checkpoint, format, architecture, .* weights, strip_prefix, drop_unknown, layout, threads, whole_tensors",
        ),
        ({"vocab_size": "250"}, "vocab_size is '250', a value of type int"),
        ({"whole_tensors": 1}, "whole_tensors is 1, a value of type bool"),
        ({"threads": 0}, "at least 1"),
    ],
)
def test_an_option_that_is_none_is_refused_with_those_there_are(given, told):
    with pytest.raises(RequestError, match=told):
        plugin.Options.of(given)


def test_whole_tensors_are_read_where_the_user_says_so_or_declares_the_architecture():
    plain, declared = (library.open(HF / "llama", architecture=architecture) for architecture in (None, "qwen2"))
    assert plugin.Options().reason_for_whole_tensors(plain) is None
    assert "asks for it" in plugin.Options(whole_tensors=True).reason_for_whole_tensors(plain)
    assert "declared by the user" in plugin.Options().reason_for_whole_tensors(declared)


def test_verls_folder_of_the_model_leads_to_the_checkpoint_around_it():
    actor = FSDP / "verl" / "checkpoint"
    opened = plugin.Options().opened(str(actor / "huggingface"), str(actor / "huggingface"))
    assert (opened.format, opened.path) == ("fsdp", str(actor))


def test_options_that_are_not_given_have_their_defaults():
    assert plugin.Options.of(None) == plugin.Options.of({}) == plugin.Options()
    assert plugin.Options.of({"checkpoint": "x", "threads": 2}) == plugin.Options(checkpoint="x", threads=2)


@pytest.mark.parametrize(
    "parallel, told",
    [
        ({}, None),
        ({"enable_eplb": False, "data_parallel_size": 1, "expert_placement_strategy": "linear"}, None),
        ({"data_parallel_size": 2}, "data-parallel"),
        ({"prefill_context_parallel_size": 2}, "data-parallel"),
        ({"enable_eplb": True}, "more than once"),
        ({"expert_placement_strategy": "round_robin"}, "round_robin"),
    ],
)
def test_experts_that_do_not_lie_by_tensor_parallel_rank_are_left_to_vllm(parallel, told):
    found = plugin.unusual_experts(SimpleNamespace(**parallel))
    assert found is None if told is None else told in found


def test_the_config_is_that_of_the_directory_that_vllm_was_told(tmp_path, monkeypatch):
    """A model named as on the hub is looked for where the hub's client keeps it."""
    folder = plugin._config_folder
    assert folder(SimpleNamespace(model=str(HF / "llama"), hf_config_path=None)) == str(HF / "llama")
    assert folder(SimpleNamespace(model="org/name", hf_config_path=str(HF / "qwen3"))) == str(HF / "qwen3")


def test_a_layout_beside_the_checkpoint_or_the_model_is_found(tmp_path):
    checkpoint, model = tmp_path / "checkpoint", tmp_path / "model"
    checkpoint.mkdir(), model.mkdir()
    assert plugin._layout_beside(checkpoint, model) == ""
    (model / "reshard.layout.json").touch()
    assert plugin._layout_beside(checkpoint, model) == str(model / "reshard.layout.json")
    (checkpoint / "reshard.layout.json").touch()
    assert plugin._layout_beside(str(checkpoint), model) == str(checkpoint / "reshard.layout.json")
