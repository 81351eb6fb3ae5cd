"""What users ran into, command by command: U1 to U12 and n1 to n24 of the third user review, and its list of polish.

ROWS says which test holds each line of its tables. Most are tested beside what they are about; the tests of the others are here.
"""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from helpers.fixture_places import DCP, FIXTURES, FSDP, HF
from helpers.reshard_command import reshard

LLAMA = HF / "llama"
TRAINED = FIXTURES / "megatron_dist" / "llama-tp2-pp2"
OF_TRAINED = ("--model", TRAINED / "model")
DECLARATION = "reshard.architecture.yaml"
TESTS = FIXTURES.parent / "tests"

# Of each line of the review: what was wrong or missing, and the test that fails if it comes back.
ROWS = """
U1  a server that hides its linear layers    live_server: a_wrong_checkpoint_is_never_held_by_a_server_that_hides_its_linear_layers
U1  --allow-not-comparable                   live_server: who_accepts_what_cannot_be_compared_gets_0_and_hears_it
U2  NaN in diff, --html, --json, -q          look_commands: diff_says_nan_and_infinity_first
U3  no tokenizer: inspect, doctor, convert   review: a_missing_tokenizer_is_said
U4  `next` of inspect, a PEFT folder         adapters: the_next_command_never_leaves_out_what_was_trained
U4  --to vllm, --merge-adapter self          adapters: an_adapter_beside_its_base_is_merged_left_out_or_refused_but_never_lost_in_silence
U4  --to peft, lora_train_meta.json          adapters: targets_that_keep_names_carry_the_adapter_and_its_settings
U4  mcore_adapters of ms-swift               megatron_adapters: ms_swifts_adapter_needs_no_option_but_the_model
U5  convert run                              choice: verls_run
U5  convert cks                              choice: without_a_choice_every_command_lists_the_checkpoints
U5  a step with data.pt                      choice: a_step_of_verl_lists_actor_and_critic_and_no_data_loader
U5  a folder of models                       choice: a_folder_of_models
U5  s3://bucket/                             runs: a_bucket_lists_all_that_lies_in_it
U5  --step on every command                  choice: with_a_step_every_command_takes_that_checkpoint
U6  misspelt keywords                        keywords: the_nearest_keyword_is_named
U6  bool() of a comparison                   keywords: a_comparison_is_no_truth_value
U7  GGUF, Orbax, Keras, ONNX ...             foreign_files: files_of_another_program_are_named_with_what_to_do
U7  --to gguf                                foreign_files: a_target_of_another_program_is_told_how_to_get_it
U8  a --model that contradicts the config    review: another_config_than_the_checkpoints_own_is_refused
U8  tie_word_embeddings                      hf: a_config_that_ties_two_heads_that_differ_is_named_by_its_key
U9  the KV cache of --dtype fp8              known_models: the_cache_has_the_models_type_unless_told
U9  activations of estimate                  known_models: training_counts_what_people_train_with
U9  the TP that inspect proposes             known_models: inspect_proposes_the_smallest_size_that_fits_80_gb_or_nothing
U10 words and tables at 80 columns           console: no_line_is_longer_than_the_terminal
U10 the answer at 24 rows                    console: inspect_leaves_its_answer_on_the_screen
U10 colour                                   console: colour
U10 errors with 100 names                    help: no_error_lists_more_than_five_names
U11 -h is one screen                         help: the_short_help_of_a_command_with_many_options_is_one_screen
U11 --to X --help                            help: help_with_a_format_shows_what_it_takes
U11 digests with options of megatron         help: a_command_shows_no_option_that_cannot_apply
U12 walls, repr, html, to_pandas             tables: a_result_is_one_line_a_printed_table_and_a_page
U12 keywords in signatures                   tables: signatures_show_the_keywords_with_their_usual_values
U12 Selection and storage_options            tables: selection_and_storage_options_are_public
n1  .torch() and .to_pandas()                tables: torch_and_pandas_say_how_to_install_them
n2  degrees llama-3-70b without a file       known_models: the_first_question_of_a_planner_is_answered_without_a_file
n3  verify --optimizer and masters           optimizer_state: verify_compares_masters_and_counts
n4  verify --optimizer after a conversion    optimizer_state: verify_finds_what_a_run_resumes_from_equal_in_every_pair_of_formats
n5  the step on its way                      review: the_step_goes_through_formats_that_have_no_place_for_it
n6  masters for a run that resumes           review: a_resumed_run_gets_the_masters
n7  a wrong role in a declaration            declared_models: a_wrong_role_is_blamed_on_the_line_that_declares_it
n8  the output of a declared model           review: the_output_of_a_declared_model_is_read_without_its_declaration
n9  a store that does not answer             lies: a_store_that_does_not_answer_is_spoken_of_before_it_is_given_up
n9  a wrong bucket                           lies: a_bucket_that_is_not_there_is_called_so
n10 an interrupted inspect                   help: an_interrupted_inspection_does_not_speak_of_resume
n11 vllm serve actor/huggingface             vllm_plugin: verls_folder_of_the_model_leads_to_the_checkpoint_around_it
n12 --tensor-parallel-size                   help: names_of_vllm_and_megatron
n12 verify --tp                              help: an_option_of_another_command_is_not_guessed
n13 --to huggingface, nemo ...               help: formats_have_other_names
n13 --to pytorch                             help: a_format_that_is_only_read_is_found_by_its_other_name
n13 convert without --to                     help: a_missing_format_is_asked_for_with_examples
n14 a missing rank                           fsdp: several_missing_ranks_are_named_and_inspect_shows_what_is_there
n15 a folder with only config.json           foreign_files: a_config_alone_is_shown_as_a_model_without_weights
n15 estimate 70b.json                        foreign_files: a_config_of_any_name_describes_a_model
n16 a text beside checkpoints in folders     foreign_files: a_file_beside_checkpoints_in_folders_is_not_called_a_part_of_one
n17 experts and quantization in line 1       review: the_first_line_says_experts_and_quantization
n18 counts of weights                        review: the_tree_counts_weights_and_says_what_each_has_besides
n19 `next` of an unknown model               review: an_undeclared_model_leads_to_a_declaration
n20 hf:// and pages of the Hub               review: what_hub_addresses_need_is_one_extra
n20 the address of a Hub page                review: a_place_that_cannot_be_read_or_written_is_named
n21 inspect a b, fingerprint a b             help: several_checkpoints
n22 does an output start?                    serve_check: a_folder_that_an_engine_takes_has_no_findings
n23 convert A /proc/out                      review: a_place_that_cannot_be_read_or_written_is_named
n24 --if-changed after a kill                if_changed: an_interrupted_run_is_resumed
3   615,232 parameters (615,232), "Hf"       review: numbers_are_said_once
3   fingerprints of 64 digits                help: fingerprints_have_12_digits_unless_asked
3   "1 replica" of two copies                review: copies_are_counted_as_copies
3   inspect run: a file that was lost        steps: a_file_that_was_lost_after_the_save_is_named
3   a picture in the README                  screens: the_terminal_of_the_readme_is_what_the_commands_print
4   headline, `next`, origin of a page       pages: a_page_says_the_answer_first_and_what_made_it
4   too many files to draw                   pages: many_holders_are_drawn_as_lanes
4   the GPU's memory in estimate             estimate_command: the_page_has_a_line_at_the_memory_of_the_gpu
"""


def test_every_line_of_the_review_is_held_by_a_test():
    lines = ROWS.strip().splitlines()
    assert {line.split()[0] for line in lines} == {*(f"U{i}" for i in range(1, 13)), *(f"n{i}" for i in range(1, 25)), "3", "4"}
    for line in lines:
        file, name = line.rpartition("  ")[2].split(": ")
        stories = "".join(path.read_text() for path in TESTS.rglob(f"test_{file}.py"))
        assert f"\ndef test_{name}(" in stories, f"there is no test_{name} in test_{file}.py"


@pytest.fixture
def nova(tmp_path):
    """A folder of a model that nobody has declared, and the user's declaration of it."""
    folder, declared = tmp_path / "nova", tmp_path / "my.yaml"
    shutil.copytree(LLAMA, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nova", "architectures": ["NovaForCausalLM"]}))
    drafted = reshard("architectures", "--start", folder)
    assert drafted.code == 0
    declared.write_text(drafted.out)
    return folder, declared


# ---- n5, n6: training state on its way between formats ----


def test_the_step_goes_through_formats_that_have_no_place_for_it(tmp_path):
    assert reshard("convert", TRAINED / "checkpoint", tmp_path / "fsdp", "--to", "fsdp", "--optimizer", "--dp", 2, *OF_TRAINED).code == 0
    assert reshard("inspect", tmp_path / "fsdp", "--json").document["step"] == 2
    back = reshard("convert", tmp_path / "fsdp", tmp_path / "back", "--to", "megatron-dist", "--optimizer", "--tp", 2)
    assert back.code == 0 and (tmp_path / "back" / "iter_0000002").is_dir()
    alone = reshard("convert", TRAINED / "checkpoint", tmp_path / "alone", "--to", "megatron", *OF_TRAINED)
    assert "weights alone are a `release`: Megatron starts a new run from them, at iteration 0" in alone.out


@pytest.mark.parametrize("target", [("dcp",), ("fsdp", "--dp", 2)])
def test_a_resumed_run_gets_the_masters(tmp_path, target):
    shown = reshard("convert", TRAINED / "checkpoint", tmp_path / "out", "--optimizer", *OF_TRAINED, "--to", *target)
    assert "the weights are the optimizer's full-precision masters" in shown.out
    kinds = {row["kind"]: row for row in reshard("inspect", tmp_path / "out", "--json").document["kinds"]}
    assert kinds["weight"]["dtype"] == "F32" and "master" not in kinds
    assert reshard("verify", TRAINED / "checkpoint", tmp_path / "out", "--optimizer", *OF_TRAINED).code == 0


# ---- n8: a declared model stays readable ----


@pytest.mark.parametrize("target", [("vllm", "--tp", 2), ("hf",), ("fsdp", "--dp", 2)])
def test_the_output_of_a_declared_model_is_read_without_its_declaration(nova, tmp_path, target):
    folder, declared = nova
    out = tmp_path / "out"
    assert reshard("convert", folder, out, "--architecture", declared, "--to", *target).code == 0
    (kept,) = out.rglob(DECLARATION)
    assert kept.read_text() == declared.read_text()
    declared.unlink()
    inspected = reshard("inspect", out, "--json").document
    assert (inspected["model_type"], inspected["architecture_known"]) == ("nova", True)
    assert reshard("verify", folder, out).code == 0 and reshard("verify", out).code == 0
    assert reshard("convert", out, tmp_path / "served", "--to", "vllm", "--tp", 4).code == 0, "it goes on to the next output"
    assert (tmp_path / "served" / DECLARATION).is_file()


def test_the_output_of_a_model_that_is_read_as_another_one_says_so(nova, tmp_path):
    folder, _ = nova
    assert reshard("convert", folder, tmp_path / "out", "--to", "vllm", "--tp", 2, "--architecture", "llama").code == 0
    assert reshard("verify", folder, tmp_path / "out").code == 0 and reshard("verify", tmp_path / "out").code == 0
    assert reshard("convert", LLAMA, tmp_path / "plain", "--to", "vllm", "--architecture", "llama").code == 0
    assert not (tmp_path / "plain" / DECLARATION).exists(), "its config.json is enough"


def test_an_own_declaration_wins_over_the_one_that_lies_there(nova, tmp_path):
    folder, declared = nova
    shutil.copy(declared, folder / DECLARATION)
    assert reshard("inspect", folder, "--json").document["architecture_known"]
    (folder / DECLARATION).write_text("language: 2\nmodel_type: nova\nextends: nothing\n")
    broken = reshard("inspect", folder)
    assert broken.code == 2 and f"{folder / DECLARATION}, line 3" in broken.err
    assert reshard("inspect", folder, "--architecture", declared).code == 0


@pytest.mark.parametrize("way", ["--overwrite", "--if-changed"])
def test_another_model_in_the_same_place_has_no_old_declaration(nova, tmp_path, way):
    folder, declared = nova
    out = tmp_path / "out"
    assert reshard("convert", folder, out, "--to", "fsdp", "--dp", 2, "--architecture", declared).code == 0
    assert reshard("convert", LLAMA, out, "--to", "fsdp", "--dp", 2, way).code == 0
    assert not list(out.rglob(DECLARATION))


def test_a_plan_file_of_a_declared_model_is_planned_again_elsewhere(nova, tmp_path):
    folder, declared = nova
    shutil.move(declared, folder / DECLARATION)
    plan = tmp_path / "plan"
    assert reshard("plan", folder, "--to", "vllm", "--tp", 2, "--plan-out", plan).code == 0
    assert reshard("convert", folder, tmp_path / "out", "--plan", plan).code == 0


# ---- n18, n17, polish: what inspect counts and says ----


def test_the_tree_counts_weights_and_says_what_each_has_besides():
    rows = {line.split()[0]: line for line in reshard("inspect", DCP / "fsdp2" / "checkpoint").out.splitlines() if " x4" in line}
    assert "  1 x4 " in rows["embed_tokens.weight"] and "  2 x4 " in rows["q_proj.weight"], "one weight, two moments, a step count"
    plain = next(line for line in reshard("inspect", LLAMA).out.splitlines() if "q_proj.weight" in line)
    assert plain.split()[1] == "2"


def test_copies_are_counted_as_copies():
    line = next(line for line in reshard("inspect", FSDP / "hsdp" / "checkpoint").out.splitlines() if "q_proj" in line)
    assert "2 along axis 0, 2 copies" in line, "two replicas of two shards: four pieces"


def test_the_first_line_says_experts_and_quantization():
    assert "(25,476 active; 8 experts, top 2)" in reshard("inspect", HF / "qwen3_moe").out.splitlines()[0]
    assert "GPTQ" in reshard("inspect", FIXTURES / "hf_packed" / "llama-gptq").out.splitlines()[0]


# ---- n19: a model that nobody has declared ----


def test_an_undeclared_model_leads_to_a_declaration(nova):
    folder, _ = nova
    assert f"next      reshard architectures --start {folder} > my.yaml" in reshard("inspect", folder).out


def test_an_undeclared_model_in_training_leads_to_the_folder_that_needs_none(nova, tmp_path):
    folder, declared = nova
    assert reshard("convert", folder, tmp_path / "run", "--to", "dcp", "--architecture", declared).code == 0
    (tmp_path / "run" / DECLARATION).unlink()
    assert f"next      reshard convert {tmp_path / 'run'} out --to hf" in reshard("inspect", tmp_path / "run").out


# ---- n20, n23: places ----


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("inspect", "https://huggingface.co/ORG/NAME"), 6, "Give hf://ORG/NAME, or the folder that `hf download ORG/NAME"),
        (("inspect", "https://huggingface.co/ORG/NAME/tree/v2/sub"), 6, "Give hf://ORG/NAME@v2,"),
        (("inspect", "https://hf.co/ORG/NAME/blob/main/config.json"), 6, "Give hf://ORG/NAME,"),
        (("convert", LLAMA, "/proc/out", "--to", "hf"), 5, "/proc/out: cannot be created: /proc takes no new files"),
    ],
)
def test_a_place_that_cannot_be_read_or_written_is_named(arguments, code, told):
    shown = reshard(*arguments)
    assert shown.code == code and told in shown.err


def test_what_hub_addresses_need_is_one_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    shown = reshard("inspect", "hf://ORG/NAME")
    assert shown.code == 6 and "hf:// paths need fsspec and huggingface_hub" in shown.err and "pip install 'reshard[hub]'" in shown.err


# ---- polish ----


def test_numbers_are_said_once(tmp_path):
    shutil.copy(LLAMA / "config.json", tmp_path / "70b.json")
    assert reshard("estimate", tmp_path / "70b.json").out.splitlines()[0] == "74,016 parameters on 1 GPU: one rank"
    assert "lacks 58.83 kB" in reshard("degrees", LLAMA / "config.json", "--gpu-memory", "100KB", "--tp", 1).out
    assert "  format " in reshard("formats").out.splitlines()[0]


# ---- U1 to U12: the rows of the tables ----


def test_a_keyword_with_a_slip_and_a_comparison_as_a_truth_value():
    import reshard as library

    for verb, given in (("open", {"modle": "x"}), ("doctor", {"deap": True}), ("stats", {"optimiser": True}), ("degrees", {"gpu_mem": 5})):
        with pytest.raises((TypeError, library.RequestError), match=r"did you mean|no option"):
            getattr(library, verb)(LLAMA, **given)
    for verb in (library.verify, library.diff):
        with pytest.raises(TypeError, match=r"\.equal"):
            bool(verb(LLAMA, LLAMA))


@pytest.mark.parametrize("command", ["inspect", "doctor", "convert"])
def test_a_missing_tokenizer_is_said(tmp_path, command):
    folder = tmp_path / "bare"
    folder.mkdir()
    for path in (*LLAMA.glob("*.safetensors"), LLAMA / "config.json"):
        shutil.copy(path, folder)
    more = (tmp_path / "out", "--to", "vllm", "--dry-run") if command == "convert" else ()
    assert "tokenizer (tokenizer.json, tokenizer.model, ...)" in reshard(command, folder, *more).out


def test_another_config_than_the_checkpoints_own_is_refused(tmp_path):
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}))
    shown = reshard("convert", LLAMA, tmp_path / "out", "--to", "vllm", "--tp", 2, "--model", tmp_path)
    assert shown.code == 2 and "num_attention_heads" in shown.err and not (tmp_path / "out").exists()
