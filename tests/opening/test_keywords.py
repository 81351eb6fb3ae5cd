"""Keywords of the public functions: a misspelt one is refused before anything is read; and a comparison is no truth value."""

import shutil

import pytest
from helpers.fixture_places import FIXTURES

import reshard

HF = FIXTURES / "hf" / "llama"
CALLS = {
    "open": lambda **options: reshard.open(HF, **options),
    "plan": lambda **options: reshard.plan(HF, to="vllm", **options),
    "view": lambda **options: reshard.open(HF).view(to="vllm", **options),
    "digests": lambda **options: reshard.digests(HF, to="vllm", **options),
    "watch": lambda **options: next(reshard.watch(HF, to="vllm", into="out/{step}", once=True, **options)),
    "cache": lambda **options: reshard.cache(reshard.plan(HF, to="hf"), root="never-written", **options),
    "serve_check": lambda **options: reshard.serve_check(HF, **options),
    "convert": lambda **options: reshard.convert(reshard.plan(HF, to="hf"), "never-written", **options),
    "convert_part": lambda **options: reshard.convert_part(reshard.plan(HF, to="hf"), "never-written", 1, 2, **options),
    "delta": lambda **options: reshard.delta(HF, HF, "never-written", **options),
    "apply": lambda **options: reshard.apply(HF, "never-read", "never-written", to="hf", **options),
    "degrees": lambda **options: reshard.degrees(HF, to="vllm", **options),
    "diff": lambda **options: reshard.diff(HF, HF, **options),
    "doctor": lambda **options: reshard.doctor(HF, **options),
    "estimate": lambda **options: reshard.estimate(HF, **options),
    "explain": lambda **options: reshard.explain(HF, HF, **options),
    "fingerprint": lambda **options: reshard.fingerprint(HF, **options),
    "push": lambda **options: reshard.push(HF, "http://127.0.0.1:9", **options),
    "transfers": lambda **options: reshard.transfers(HF, to="vllm", **options),
    "stats": lambda **options: reshard.stats(HF, **options),
    "verify": lambda **options: reshard.verify(HF, HF, **options),
}


def test_every_function_with_further_keywords_is_in_the_table():
    functions = {name: found for name in reshard.__all__ if not isinstance(found := getattr(reshard, name), type)}
    public = {name for name, function in functions.items() if "options" in function.__annotations__}
    assert public <= CALLS.keys() and len(public) > 10


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_keyword_is_refused_by_name(name):
    with pytest.raises(reshard.RequestError, match="there is no option 'nonsense'"):
        CALLS[name](nonsense=1)


@pytest.mark.parametrize(
    ("name", "wrong", "meant"),
    [
        ("open", "modle", "model"),
        ("open", "architecure", "architecture"),
        ("open", "vocab", "vocab_size"),
        ("doctor", "deap", "deep"),
        ("degrees", "gpu_mem", "gpu_memory"),
        ("estimate", "gpu", "gpus"),
        ("stats", "optimiser", "optimizer"),
        ("verify", "selction", "selection"),
        ("plan", "tpp", "tp"),
        ("watch", "dtpye", "dtype"),
    ],
)
def test_the_nearest_keyword_is_named(name, wrong, meant):
    with pytest.raises(reshard.RequestError, match=f"Did you mean {meant}[?]"):
        CALLS[name](**{wrong: 1})


def test_an_option_of_another_format_is_still_told_apart_from_a_misspelt_one():
    for name in ("plan", "view", "digests"):
        with pytest.raises(reshard.RequestError, match="`vp=` does not apply to vllm"):
            CALLS[name](vp=2)


def test_a_comparison_is_no_truth_value(tmp_path):
    (file,) = HF.glob("*.safetensors")
    shutil.copytree(HF, tmp_path / "changed")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    (tmp_path / "changed" / file.name).write_bytes(data)
    for compared in (reshard.verify(HF, HF), reshard.diff(HF, HF), reshard.diff(HF, tmp_path / "changed")):
        with pytest.raises(TypeError, match=r"\.equal"):
            assert compared
    assert reshard.verify(HF, HF).equal and not reshard.diff(HF, tmp_path / "changed").equal


def test_a_keyword_with_a_slip_and_a_comparison_as_a_truth_value():
    for verb, given in (("open", {"modle": "x"}), ("doctor", {"deap": True}), ("stats", {"optimiser": True}), ("degrees", {"gpu_mem": 5})):
        with pytest.raises((TypeError, reshard.RequestError), match=r"did you mean|no option"):
            getattr(reshard, verb)(HF, **given)
    for verb in (reshard.verify, reshard.diff):
        with pytest.raises(TypeError, match=r"\.equal"):
            bool(verb(HF, HF))
