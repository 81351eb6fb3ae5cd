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
    "push_adapter": lambda **options: reshard.push_adapter(FIXTURES / "peft" / "plain" / "adapter", "http://127.0.0.1:9", **options),
    "folder": lambda **options: reshard.folder(HF, to="hf", **options),
    "hub": lambda **options: reshard.hub(HF, port=0, **options),
    "sign": lambda **options: reshard.sign(HF, key="never-read", **options),
    "push": lambda **options: reshard.push(HF, "http://127.0.0.1:9", **options),
    "transfers": lambda **options: reshard.transfers(HF, to="vllm", **options),
    "log": lambda **options: reshard.log(FIXTURES / "delta", **options),
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


def test_convert_takes_what_the_command_line_takes(tmp_path):
    by_plan = reshard.convert(reshard.plan(HF, to="vllm", tp=2), tmp_path / "planned")
    at_once = reshard.convert(HF, tmp_path / "at-once", to="vllm", tp=2)
    by_method = reshard.open(HF).to("vllm", tp=2, path=tmp_path / "by-method")
    assert by_plan.fingerprint.root == at_once.fingerprint.root == by_method.fingerprint.root
    assert by_plan.files == at_once.files == by_method.files and len(at_once.files) == 2
    assert len(repr(at_once)) < 200


def test_convert_takes_the_keywords_of_open(tmp_path):
    run = FIXTURES / "delta"
    at_100, at_200 = (reshard.convert(run, tmp_path / str(step), to="hf", step=step) for step in (100, 200))
    assert at_100.fingerprint.root != at_200.fingerprint.root


@pytest.mark.parametrize("keywords", [{"tp": 2}, {"to": "hf"}, {"model": "somewhere"}])
def test_what_a_plan_holds_is_not_given_with_it(tmp_path, keywords):
    name = next(iter(keywords))
    with pytest.raises(reshard.RequestError, match=f"`{name}=` belongs to the plan") as refused:
        reshard.convert(reshard.plan(HF, to="vllm"), tmp_path / "out", **keywords)
    assert f"reshard.plan(..., {name}=...)" in str(refused.value) and not (tmp_path / "out").exists()


def test_a_source_without_a_target_format_is_refused(tmp_path):
    with pytest.raises(reshard.RequestError, match=r"(?i)no target format is given"):
        reshard.convert(HF, tmp_path / "out")


def test_sizes_are_texts_as_on_the_command_line():
    assert str(reshard.degrees("llama-3-8b", gpu_memory="80GiB")) == str(reshard.degrees("llama-3-8b", gpu_memory=80 << 30))
    assert reshard.fingerprint(HF, memory="64MiB").root == reshard.fingerprint(HF).root


def test_a_checkpoint_has_one_count_of_tensors():
    checkpoint = reshard.open(FIXTURES / "dcp" / "fsdp2" / "checkpoint", model=FIXTURES / "dcp" / "fsdp2" / "model")
    assert len(checkpoint) == len([*checkpoint]) == len(checkpoint.keys()) == len(checkpoint.index.tensors) == 84
    for shown in (checkpoint, checkpoint.model, checkpoint.model.architecture, checkpoint.tree):
        assert len(repr(shown)) < 300


@pytest.mark.parametrize(("tried", "meant"), [("inspect", "open"), ("covert", "convert"), ("fingerprints", "fingerprint")])
def test_a_name_that_is_not_there_names_the_function(tried, meant):
    with pytest.raises(AttributeError, match=rf"Did you mean reshard\.{meant}\?"):
        getattr(reshard, tried)


def test_a_notebook_shows_the_callers_line_and_the_sentence():
    with pytest.raises(reshard.ReshardError) as refused:
        reshard.plan(HF, to="vllm", tp=3)
    shown = "".join(refused.value._render_traceback_())
    assert shown.count("File ") == 1 and 'reshard.plan(HF, to="vllm", tp=3)' in shown
    assert "`tp=3` does not fit this model" in shown and "errors.md#illegal-sizes" in shown
