"""Whatever is array-like among weights and optimizer state is carried, refused by the name of its class, or named in the result."""

import argparse
import dataclasses
import hashlib
import json
import pickle
import shutil
import struct
import sys
import types

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES
from helpers.reshard_command import reshard as run
from safetensors.numpy import load_file

import reshard
from reshard.canonical.optimizer_state import kind_of_path, kind_path, parameter_and_kind
from reshard.containers import torch_zip
from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import BF16, F32, from_torch
from reshard.storage.decoded_ranges import DecodedRanges
from reshard.storage.files import LocalFiles

torch = pytest.importorskip("torch", reason="torch writes and loads the files")
dcp = pytest.importorskip("torch.distributed.checkpoint", reason="torch writes and loads the files")

TORCHAO = FIXTURES / "torchao"
W = torch.arange(24, dtype=torch.float32).reshape(4, 6)
GROUP = {"lr": 0.000375, "betas": (0.9, 0.95), "weight_decay": 0.1}
ARRAYS = {
    "c": np.linspace(-3, 300, 6, dtype="f4").reshape(2, 3),
    "fortran": np.asfortranarray(np.linspace(-9, 9, 12).reshape(3, 4)),
    "half": np.array([0.1, -2], "f2"),
    "bytes": np.arange(256, dtype="u1"),
    "flags": np.array([True, False]),
    "scalar": np.float32(0.1),
    "no_axes": np.array(7, "i8"),
    "empty": np.zeros((0, 3)),
    "strided": np.arange(12, dtype="f4").reshape(3, 4)[:, ::2],
    "twice": np.arange(6, dtype="f4"),
}
# torch cannot save complex128 to safetensors.
SAFE = {name: array for name, array in ARRAYS.items() if array.dtype.kind != "c"}


@dataclasses.dataclass
class Holder:
    inside: object


class Attributed(torch.Tensor):
    """A tensor whose attributes matter."""


def attributed():
    tensor = torch.ones(3).as_subclass(Attributed)
    tensor.scale = 3.0
    return tensor


NOT_READ = {
    "coo": (W.to_sparse(), "torch.sparse_tensor"),
    "csr": (W.to_sparse_csr(), "torch.sparse_tensor"),
    "csc": (W.to_sparse_csc(), "torch.sparse_tensor"),
    "bsr": (W.to_sparse_bsr((2, 2)), "torch.sparse_tensor"),
    "bsc": (W.to_sparse_bsc((2, 2)), "torch.sparse_tensor"),
    "jagged": (torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged), "NestedTensor"),
    "nested": (torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), "torch.nested_tensor"),
    "qint8": (torch.quantize_per_tensor(W, 0.1, 3, torch.qint8), "torch.qtensor"),
    "quint8": (torch.quantize_per_channel(W, torch.ones(4), torch.zeros(4), 0, torch.quint8), "torch.qtensor"),
    "meta": (torch.empty(3, 4, device="meta"), "meta"),
    "conjugated": (torch.ones(2, dtype=torch.complex64).conj(), "conj"),
    "masked": (torch.masked.masked_tensor(W, W > 3), "MaskedTensor"),
    "attributed": (attributed(), "Attributed"),
    "uninitialized": (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    "storage": (W.clone().untyped_storage(), "torch.storage"),
    "objects": (np.array([1, "a"], object), "numpy.ndarray"),
    "texts": (np.array(["ab"]), "numpy.ndarray"),
    "dates": (np.array(["2020-01-01"], "M8[D]"), "numpy.ndarray"),
    "records": (np.zeros(2, [("a", "f4"), ("b", "i4")]), "numpy.ndarray"),
    "masked_array": (np.ma.array([1.0, 2.0], mask=[0, 1]), "MaskedArray"),
    "held": (Holder(W), "Holder"),
    "big_endian": (np.array([1, 2**20 + 255, -7], ">i4"), "numpy.ndarray"),
    "big_endian_complex": (np.array([1.5 - 2j, 3e20 + 255j], ">c16"), "numpy.ndarray"),
}


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def converted(source, target, *options):
    result = run("convert", source, target, "--to", *options)
    assert result.code == 0, result.err
    return result


# ---- numpy ----


@pytest.mark.parametrize(("protocol", "zipped"), [(2, True), (3, True), (4, True), (5, True), (2, False)])
def test_numpy_arrays_are_tensors(tmp_path, protocol, zipped):
    arrays = {**SAFE, "again": SAFE["twice"]}
    nested = {"w": W, **arrays, "in": {"dict": SAFE["c"], "list": [SAFE["half"], {"deeper": SAFE["fortran"]}]}}
    torch.save({"model": nested}, tmp_path / "m.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    converted(tmp_path / "m.pt", tmp_path / "out", "hf", "--keep-unknown")
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = {**arrays, "w": W.numpy(), "in.dict": SAFE["c"], "in.list.0": SAFE["half"], "in.list.1.deeper": SAFE["fortran"]}
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        assert same_bits(written[name], np.asarray(array)), name


@pytest.mark.parametrize("protocol", [2, 5])
def test_every_element_type_and_order_of_numpy_is_read(tmp_path, protocol):
    torch.save(ARRAYS, tmp_path / "m.pt", pickle_protocol=protocol)
    opened = reshard.open(tmp_path / "m.pt")
    for name, array in ARRAYS.items():
        assert same_bits(opened[name].numpy(), np.asarray(array)), name


def test_bfloat16_of_ml_dtypes_is_bfloat16():
    """Their pickle names the class of the type (ml_dtypes 0.5): no package that is installed here makes one."""
    from reshard.geometry.dtypes import from_numpy

    assert from_numpy("ml_dtypes.bfloat16") == BF16 and from_numpy("O8") is None and from_numpy("U2") is None


def test_elements_that_another_process_found_are_read(tmp_path):
    """A reader in another process hands over the path of a range alone."""
    data = bytes(range(256)) * 300
    text = data.decode("latin1").encode()
    (tmp_path / "f").write_bytes(b"xyz" + text)
    path = LocalFiles(tmp_path).decoded("f", 3, len(text), ("latin1",), limit=len(data))
    ranges = DecodedRanges(LocalFiles(tmp_path).read_into)
    buffer = bytearray(len(data))
    ranges.read_into(path, 0, memoryview(buffer))
    assert buffer == data


def test_a_million_arrays_in_an_order_made_by_hand_take_no_time(tmp_path):
    """Elements are searched from the last ones on; what does not follow them is searched for a limited time only."""
    source = torch_zip.Range(LocalFiles(FIXTURES), "README.md")
    elements = torch_zip._Elements(source, b"\x80\x04" + b"\0" * (1 << 20), 0)
    found = [elements.place(struct.pack("<Q", i + (1 << 60)), F32, (2,), (1,)) for i in range(20_000)]
    assert not any(found)


# ---- other classes ----


@pytest.mark.parametrize("kind", NOT_READ)
def test_a_weight_of_another_class_is_refused_by_its_name(tmp_path, kind):
    value, class_name = NOT_READ[kind]
    torch.save({"model": {"w": W, "layers.0.x": value}}, tmp_path / "m.pt")
    result = run("convert", tmp_path / "m.pt", tmp_path / "out", "--to", "hf")
    assert result.code == 6 and "layers.0.x" in result.err and class_name in result.err and "opy the file" not in result.err
    assert not (tmp_path / "out").exists()
    inspected = run("inspect", tmp_path / "m.pt")
    assert "complete" not in inspected.out and "layers.0.x" in inspected.out and class_name in inspected.out
    document = json.loads(run("inspect", tmp_path / "m.pt", "--json").out)
    assert class_name in document["outlook"]["problem"]
    assert "unread-weight" in run("doctor", tmp_path / "m.pt").out
    for command in ("fingerprint", "stats"):
        assert run(command, tmp_path / "m.pt").code == 6
    converted(tmp_path / "m.pt", tmp_path / "out", "hf", "--exclude", "layers.0.x")
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors")["w"], W.numpy())


@pytest.mark.parametrize("around", [lambda x: [x], lambda x: {"a": {"b": x}}, lambda x: (W, x), Holder, lambda x: {"a": [Holder([x])]}])
def test_it_is_refused_wherever_it_is_nested(tmp_path, around):
    torch.save({"model": {"w": W, "name": around(W.to_sparse())}}, tmp_path / "m.pt")
    result = run("convert", tmp_path / "m.pt", tmp_path / "out", "--to", "hf")
    assert result.code == 6 and "name" in result.err and ("torch.sparse_tensor" in result.err or "Holder" in result.err)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model_world_size_1_rank_0.pt", "consolidated.00.pth"])
def test_no_reader_of_pickles_loses_it(tmp_path, name):
    (tmp_path / "source").mkdir()
    torch.save({"norm.weight": W, "x": W.to_sparse(), "y": SAFE["c"]}, tmp_path / "source" / name)
    result = run("convert", tmp_path / "source", tmp_path / "out", "--to", "hf")
    assert result.code == 6 and "x: it is stored as torch.sparse_tensor" in result.err
    converted(tmp_path / "source", tmp_path / "out", "hf", "--exclude", "x")
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors")["y"], SAFE["c"])


@pytest.mark.parametrize("kind", NOT_READ)
def test_optimizer_state_of_another_class_is_named_and_hinders_nothing(tmp_path, kind):
    value, class_name = NOT_READ[kind]
    state = {"step": torch.tensor(3.0), "exp_avg": W + 1, "exp_avg_sq": W + 2, "other": value}
    torch.save({"model": {"w": W}, "optimizer": {"state": {0: state}, "param_groups": [{"params": [0], **GROUP}]}}, tmp_path / "m.pt")
    assert "unread-state" in run("doctor", tmp_path / "m.pt").out
    for target, options in (("hf", ()), ("dcp", ("--optimizer",)), ("fsdp", ("--optimizer",)), ("universal", ())):
        result = converted(tmp_path / "m.pt", tmp_path / target, target, *options)
        skipped = [line for line in result.out.splitlines() if "skip" in line and class_name in line]
        assert len(skipped) == 1 and "w.other" in skipped[0] and "serving" not in skipped[0]
        dropped = json.loads((tmp_path / target / "reshard.json").read_text())["dropped"]
        assert any(class_name in drop["reason"] for drop in dropped)


def test_a_class_around_one_tensor_is_that_tensor():
    """The tensor has the element type and the size that the class shows; attributes that cache something do not count."""
    for source in ("float8/model.pt", "float8/checkpoint"):
        opened, values = reshard.open(TORCHAO / source), json.loads((TORCHAO / "float8" / "values.json").read_text())
        assert set(opened) == values.keys()
        for name, value in values.items():
            tensor = opened[name].numpy()
            assert (str(tensor.dtype), list(tensor.shape)) == (value["dtype"], value["shape"])
            assert hashlib.sha256(tensor.tobytes()).hexdigest() == value["sha256"]


class Wrapper(torch.Tensor):
    """A class around tensors, as torch.utils._python_dispatch knows them."""

    @staticmethod
    def __new__(cls, shown, **inner):
        return torch.Tensor._make_wrapper_subclass(cls, shown.shape, dtype=shown.dtype)

    def __init__(self, shown, **inner):
        self.__dict__.update(inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default
        return args[0]


@pytest.mark.parametrize(
    ("inner", "is_read"),
    [
        ({"_data": W}, True),
        ({"elem": W, "config": {"a": 1}}, True),
        ({"_data": W.to(torch.int8)}, False),
        ({"_data": W.reshape(6, 4)}, False),
        ({"_data": W, "_scale": torch.ones(1)}, False),
        ({"codes": W.to(torch.uint8), "scale": torch.ones(4), "qmap": torch.ones(256)}, False),
        ({"_data": [W]}, True),
        ({"_data": W.to_sparse()}, False),
    ],
)
def test_a_class_is_the_tensor_that_it_wraps_only_if_both_look_alike(tmp_path, inner, is_read):
    torch.save({"w": W, "x": Wrapper(W, **inner), "p": torch.nn.Parameter(Wrapper(W, **inner))}, tmp_path / "m.pt")
    if is_read:
        opened = reshard.open(tmp_path / "m.pt")
        assert same_bits(opened["x"].numpy(), W.numpy()) and same_bits(opened["p"].numpy(), W.numpy())
    else:
        result = run("convert", tmp_path / "m.pt", tmp_path / "out", "--to", "hf")
        assert result.code == 6 and "Wrapper" in result.err


def test_quantized_weights_of_torchao_are_named_and_8_bit_states_hinder_nothing(tmp_path):
    result = run("convert", TORCHAO / "int8", tmp_path / "int8", "--to", "hf")
    assert result.code == 6 and "0.weight: it is stored as torchao.quantization.Int8Tensor" in result.err
    values = json.loads((TORCHAO / "adamw8bit" / "values.json").read_text())
    for source in ("model.pt", "checkpoint"):
        target = tmp_path / source
        converted(TORCHAO / "adamw8bit" / source, target / "hf", "hf")
        written = load_file(target / "hf" / "model.safetensors")
        assert {hashlib.sha256(tensor.tobytes()).hexdigest() for tensor in written.values()} == {
            values[name]["sha256"] for name in ("weight", "bias")
        }
        assert "OptimState8bit" in run("inspect", TORCHAO / "adamw8bit" / source).out


# ---- the settings and the state of optimizers ----


def optimizer(settings, **state):
    moments = {"step": torch.tensor(3.0), "exp_avg": W + 1, "exp_avg_sq": W + 2}
    return {"state": {"w": {**moments, **state}}, "param_groups": [{"params": ["w"], **settings}]}


def saved(tmp_path, form, content):
    if form == "dcp":
        dcp.save({"model": {"w": W}, "optim": content}, checkpoint_id=tmp_path / form, no_dist=True)
        return tmp_path / form
    folder = tmp_path / form
    folder.mkdir()
    if form == "pt":
        torch.save({"model": {"w": W}, "optimizer": content}, folder / "m.pt")
    elif form == "lightning":
        torch.save({"state_dict": {"w": W}, "optimizer_states": [content], "lr_schedulers": []}, folder / "last.ckpt")
    else:
        torch.save({"w": W}, folder / "model_world_size_1_rank_0.pt")
        torch.save(content, folder / "optim_world_size_1_rank_0.pt")
    return folder


FORMS = ("dcp", "pt", "lightning", "fsdp")
AS_TENSORS = {"lr": torch.tensor(0.000375), "betas": (torch.tensor(0.9), torch.tensor(0.95)), "weight_decay": np.float64(0.1)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", ["dcp", "fsdp", "universal", "deepspeed"])
def test_a_setting_is_the_same_as_a_tensor_and_as_a_number(tmp_path, form, target):
    options = ("--optimizer",) if target in ("dcp", "fsdp") else ()
    for number, settings in enumerate((GROUP, AS_TENSORS, {**AS_TENSORS, "lr": np.float32(0.000375), "betas": [0.9, torch.tensor(0.95)]})):
        source = saved(tmp_path / str(number) if (tmp_path / str(number)).mkdir() is None else tmp_path, form, optimizer(settings))
        converted(source, tmp_path / f"out{number}", target, *options)
        (group,) = reshard.open(tmp_path / f"out{number}").index.param_groups()
        kept = {name: group.settings[name] for name in GROUP}
        assert {**kept, "betas": tuple(kept["betas"])} == GROUP
    if target == "fsdp":
        read = torch.load(tmp_path / "out1" / "optim_world_size_1_rank_0.pt", weights_only=False)
        assert read["param_groups"][0]["lr"] == 0.000375


@pytest.mark.parametrize("number", [0.1, 0.000375, 1e-8, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_number_is_the_shortest_that_is_stored_as_the_same_element(number, dtype):
    stored = torch.tensor(number, dtype=dtype)
    read = from_torch(str(dtype), where="").number(stored.reshape(1).view(torch.uint8).numpy().tobytes())
    assert torch.equal(torch.tensor(read, dtype=dtype), stored)
    if dtype in (torch.float32, torch.float64):
        assert read == number


@pytest.mark.parametrize("form", FORMS)
def test_an_array_among_the_settings_is_named(tmp_path, form):
    source = saved(tmp_path, form, optimizer({**GROUP, "curve": torch.ones(3)}))
    result = converted(source, tmp_path / "out", "dcp", "--optimizer")
    assert "optim.param_groups.0.curve" in result.out and "serving" not in result.out


GG = [torch.arange(16.0).reshape(4, 4), torch.arange(36.0).reshape(6, 6)]


@pytest.mark.parametrize("form", FORMS)
def test_lists_and_dicts_in_optimizer_state_are_carried(tmp_path, form):
    content = optimizer(GROUP, GG=GG, Q=list(reversed(GG)), array=SAFE["c"], block={"factors": [W + 5, W + 6]})
    source = saved(tmp_path, form, content)
    converted(source, tmp_path / "to-dcp", "dcp", "--optimizer")
    metadata = dcp.FileSystemReader(tmp_path / "to-dcp").read_metadata()
    expected = {"GG.0": GG[0], "GG.1": GG[1], "Q.0": GG[1], "Q.1": GG[0], "block.factors.0": W + 5, "block.factors.1": W + 6}
    read = {f"optim.state.w.{kind}": torch.full_like(tensor, -1) for kind, tensor in expected.items()}
    assert read.keys() <= metadata.state_dict_metadata.keys()
    dcp.load(read, checkpoint_id=tmp_path / "to-dcp", no_dist=True)
    assert all(torch.equal(read[f"optim.state.w.{kind}"], tensor) for kind, tensor in expected.items())
    converted(tmp_path / "to-dcp", tmp_path / "to-fsdp", "fsdp", "--optimizer")
    state = torch.load(tmp_path / "to-fsdp" / "optim_world_size_1_rank_0.pt", weights_only=False)["state"][0]
    assert [type(state[kind]) for kind in ("GG", "block")] == [list, dict]
    assert all(torch.equal(tensor.to_local(), whole) for tensor, whole in zip(state["GG"], GG, strict=True))
    assert torch.equal(state["block"]["factors"][1].to_local(), W + 6) and torch.equal(state["exp_avg"].to_local(), W + 1)
    assert run("verify", tmp_path / "to-dcp", tmp_path / "to-fsdp", "--optimizer").code == 0
    for target in ("universal", "deepspeed"):
        result = converted(source, tmp_path / target, target)
        assert "5 state" in result.out and "its shape is not that of the parameter" in result.out


@pytest.mark.parametrize("path", [("exp_avg",), ("GG", 0), ("a", "b", 3, 0), ("8bit", 2)])
def test_a_kind_of_state_and_its_path_are_inverse(path):
    kind = kind_of_path(path)
    assert kind_path(kind) == path
    for parameter in ("w", "layers.0.weight", "scales.0"):
        assert parameter_and_kind(f"optim.state.{parameter}.{kind}") == (parameter, kind)


def test_several_optimizers_of_lightning_are_named(tmp_path):
    torch.save({"state_dict": {"w": W}, "optimizer_states": [optimizer(GROUP), optimizer(GROUP)]}, tmp_path / "last.ckpt")
    result = converted(tmp_path / "last.ckpt", tmp_path / "out", "hf")
    assert "optimizer_states.0.state.w.step" in result.out


def test_objects_of_dcp_that_hold_arrays_are_read_or_named(tmp_path):
    model = {"w": W, "array": SAFE["c"], "note": "seven"}
    dcp.save({"model": model}, checkpoint_id=tmp_path / "a", no_dist=True)
    converted(tmp_path / "a", tmp_path / "out", "hf")
    assert same_bits(load_file(tmp_path / "out" / "model.safetensors")["array"], SAFE["c"])
    dcp.save({"model": {**model, "held": Holder(W)}}, checkpoint_id=tmp_path / "b", no_dist=True)
    result = run("convert", tmp_path / "b", tmp_path / "out2", "--to", "hf")
    assert result.code == 6 and "held" in result.err and "Holder" in result.err


# ---- files of frameworks, changed ----


class Loose(pickle.Unpickler):
    """An unpickler without the framework whose classes the file names."""

    def find_class(self, module, name):
        return type(name, (str,), {}) if module.startswith("megatron") else super().find_class(module, name)


def changed(case, path, change, tmp_path):
    """A copy of a fixture in which one pickle is changed. Only plain settings are kept."""
    folder = shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / "source")
    loose = types.SimpleNamespace(Unpickler=Loose, load=pickle.load, __name__="loose")
    root = torch.load(folder / path, weights_only=False, pickle_module=loose)
    if "args" in root:
        settings = vars(root["args"]).items()
        root["args"] = argparse.Namespace(**{key: value for key, value in settings if type(value) in (int, float, str, bool)})
    change(root)
    torch.save(root, folder / path)
    return folder


DEEPSPEED = "deepspeed/z0-fp32", "global_step2/mp_rank_00_model_states.pt"
MEGATRON = "megatron/llama-fp32", "iter_0000002/mp_rank_00/model_optim_rng.pt"


@pytest.mark.parametrize("place", [DEEPSPEED, MEGATRON])
def test_weights_of_other_classes_are_refused_in_the_files_of_ranks(tmp_path, place):
    def change(root):
        weights = root.get("module") or root["model"]
        name, tensor = next((name, tensor) for name, tensor in weights.items() if isinstance(tensor, torch.Tensor) and tensor.dim() == 2)
        weights[name] = tensor.to_sparse()

    folder = changed(*place, change, tmp_path)
    result = run("convert", folder, tmp_path / "out", "--to", "hf")
    assert result.code == 6 and "torch.sparse_tensor" in result.err and "opy the file" not in result.err


@pytest.mark.parametrize("place", [DEEPSPEED, MEGATRON])
def test_states_and_settings_are_kept_or_named_in_the_files_of_ranks(tmp_path, place):
    def change(root):
        optimizer = root["optimizer"].get("optimizer", root["optimizer"])
        for group in optimizer["param_groups"]:
            group["lr"] = torch.tensor(0.000375)
        next(iter(optimizer["state"].values()))["other"] = torch.ones(3).to_sparse()

    folder = changed(*place, change, tmp_path)
    vocabulary = ("--vocab-size", "64") if place == MEGATRON else ()
    for target, options in (("hf", ()), ("dcp", ("--optimizer",))):
        result = converted(folder, tmp_path / target, target, *options, *vocabulary)
        assert "other" in result.out and "torch.sparse_tensor" in result.out
    assert all(group.settings["lr"] == 0.000375 for group in reshard.open(tmp_path / "dcp").index.param_groups())


def test_numpy_weights_of_deepspeed_are_tensors(tmp_path):
    def change(root):
        root["module"] = {name: tensor.numpy() for name, tensor in root["module"].items()}

    folder = changed(*DEEPSPEED, change, tmp_path)
    assert run("verify", FIXTURES / "deepspeed" / "z0-fp32" / "checkpoint", folder).code == 0


TE_CLASSES = {
    "float8_tensor": ("_make_float8_tensor_in_reduce_ex", "Float8Tensor"),
    "mxfp8_tensor": ("_make_mxfp8_tensor_in_reduce_ex", "MXFP8Tensor"),
    "float8_blockwise_tensor": ("_make_float8_blockwise_tensor_in_reduce_ex", "Float8BlockwiseQTensor"),
    "nvfp4_tensor": ("_make_nvfp4_tensor_in_reduce_ex", "NVFP4Tensor"),
}


@pytest.mark.parametrize("module", TE_CLASSES)
def test_quantized_weights_of_transformer_engine_are_named(tmp_path, monkeypatch, module):
    """In the form of its `__reduce_ex__`; Transformer Engine itself needs a GPU build."""
    name, class_name = TE_CLASSES[module]
    full = f"transformer_engine.pytorch.tensor.{module}"
    parts = full.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))

    def make(*_):
        raise AssertionError("the code of a checkpoint was called")

    make.__module__, make.__qualname__, make.__name__ = full, name, name
    setattr(sys.modules[full], name, make)
    stand_in = type("StandIn", (), {"__reduce_ex__": lambda self, _: (make, (torch.ones(2, 4, dtype=torch.uint8), torch.ones(1)))})()
    torch.save({"model": {"w": stand_in, "norm": W}}, tmp_path / "m.pt")
    with pytest.raises(UnsupportedError, match=rf"{full}\.{class_name}.*dequantize"):
        reshard.plan(tmp_path / "m.pt", to="hf")
    reshard.convert(reshard.plan(tmp_path / "m.pt", to="hf", exclude=["w"]), tmp_path / "out")
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["norm"]
