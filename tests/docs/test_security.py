"""SECURITY.md, claim by claim: each has tests, and what can be watched is watched here.

A new claim without tests fails, and so does a test that is renamed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.doc_pages import FIXTURES, ROOT
from hostile.limits import ON_LINUX
from hostile.watched import outcome_of

# The words in bold of each claim -> tests of what it says, as file::name.
CLAIMS = {
    "It executes nothing from a checkpoint.": [
        "tests/hostile/test_hostile_containers.py::test_nothing_runs",
        "tests/hostile/test_hostile_checkpoints.py::test_a_metadata_that_is_a_program_runs_nothing",
        "tests/docs/test_security.py::test_a_conversion_imports_no_framework",
    ],
    "It has no telemetry, and connects only to what you name on the command line": [
        "tests/docs/test_security.py::test_a_command_touches_only_what_it_is_given",
        "tests/cli/test_live_server.py::test_a_command_connects_to_the_given_address_only",
        "tests/cli/test_live_server.py::test_no_redirect_is_followed",
        "tests/cloud/test_lies.py::test_a_web_server_does_not_lead_elsewhere",
        "tests/cloud/test_lies.py::test_an_s3_endpoint_does_not_lead_to_another_host",
        "tests/cli/test_live_server.py::test_no_proxy_is_used",
    ],
    "Only who knows its secret takes part in a push or in an update by `Sender`.": [
        "tests/live/test_strangers.py::test_what_a_stranger_says_ends_its_connection_and_changes_nothing",
        "tests/live/test_strangers.py::test_nothing_is_parsed_before_its_seal",
        "tests/live/test_strangers.py::test_a_conversation_that_was_recorded_cannot_be_said_again",
        "tests/live/test_strangers.py::test_a_message_that_lies_is_refused_in_one_sentence",
        "tests/live/test_strangers.py::test_who_changes_bytes_cannot_change_the_digest_with_them",
        "tests/live/test_strangers.py::test_a_secret_on_one_host_is_a_file_of_this_user_alone_until_it_is_forgotten",
        "tests/live/test_strangers.py::test_a_secret_goes_to_another_host_only_where_the_network_is_trusted_or_by_the_environment",
        "tests/live/test_strangers.py::test_an_engine_with_another_token_does_not_join_and_nobody_tells_a_token",
    ],
    "`reshard hub` serves only what it announces, and only to clients that may read it.": [
        "tests/doors/test_hub.py::test_what_is_not_announced_does_not_exist",
        "tests/doors/test_hub.py::test_another_host_is_refused_without_a_token",
        "tests/doors/test_hub.py::test_another_address_needs_the_token",
        "tests/doors/test_hub.py::test_signatures_of_s3_are_compared",
        "tests/doors/test_hub.py::test_what_no_client_sends_is_refused_and_the_server_lives",
        "tests/doors/test_hub.py::test_a_slow_head_and_too_many_connections_end",
        "tests/doors/test_hub.py::test_pages_for_people_are_inert",
    ],
    "The transport `shared` opens no file that a peer names": [
        "tests/live/test_strangers.py::test_memory_that_is_not_ours_is_refused_and_stays_as_it_is",
        "tests/live/test_strangers.py::test_a_rank_that_names_another_file_for_shared_memory_is_refused",
    ],
    "A server's answer is input like a checkpoint, and limited as a whole": [
        "tests/live/test_strangers.py::test_a_rank_that_lies_about_itself_is_refused_before_the_server_is_paused",
        "tests/live/test_strangers.py::test_a_rank_cannot_keep_weights_as_its_own",
        "tests/cli/test_live_server.py::test_a_server_that_lies_is_refused_in_one_sentence_within_its_limits",
    ],
    "It writes only to the directory and the files that you name.": [
        "tests/docs/test_security.py::test_a_command_touches_only_what_it_is_given",
        "tests/hostile/test_own_files.py::test_a_work_folder_that_is_a_link_is_not_followed",
        "tests/hostile/test_own_files.py::test_the_work_folder_of_another_program_stays",
        "tests/hostile/test_own_files.py::test_a_link_inside_of_the_work_folder_is_not_followed",
        "tests/cli/test_output_files.py::test_a_link_a_directory_a_disk_and_a_lost_folder_are_refused_before_the_work",
        "tests/cli/test_output_files.py::test_a_device_is_written_into_and_stays",
    ],
    "It trusts no number in a file.": [
        "tests/hostile/test_hostile_containers.py::test_safetensors_that_lie_are_refused_with_numbers",
        "tests/hostile/test_hostile_fields.py::test_a_billion_of_anything_is_refused",
        "tests/hostile/test_hostile_fields.py::test_a_config_nested_too_deep_or_with_too_many_digits",
        "tests/hostile/test_own_files.py::test_a_journal_without_end_takes_neither_memory_nor_time",
        "tests/hostile/test_own_files.py::test_a_journal_with_values_of_other_types_is_one_clear_paragraph",
    ],
    "It tells and records no credentials.": [
        "tests/cloud/test_secrets.py::test_no_command_tells_or_records_what_opens_a_store",
        "tests/cloud/test_secrets.py::test_the_password_of_a_url_is_told_to_the_server_alone",
        "tests/cloud/test_secrets.py::test_no_scheme_of_a_url_lets_its_secrets_out",
        "tests/cli/test_secrets.py::test_no_option_lets_a_secret_out",
    ],
    "A private key signs, and goes nowhere.": [
        "tests/signing/test_signatures.py::test_the_private_key_and_its_passphrase_are_in_no_text_and_no_file",
        "tests/signing/test_signatures.py::test_signing_and_checking_use_no_network",
        "tests/signing/test_signatures.py::test_what_has_changed_is_named",
        "tests/signing/test_signatures.py::test_another_key_is_named_with_its_digest",
        "tests/signing/test_signatures.py::test_what_is_no_bundle_is_one_clear_difference",
    ],
    "It removes only what it wrote and lists.": [
        "tests/runs/test_kept.py::test_the_users_files_in_a_step_that_is_replaced_or_removed_stay",
        "tests/runs/test_kept.py::test_a_listed_path_through_a_link_removes_nothing_elsewhere",
        "tests/runs/test_watch.py::test_the_users_files_in_an_output_that_is_too_old_stay",
        "tests/cloud/test_runs.py::test_the_users_objects_in_an_output_that_is_too_old_stay",
        "tests/cli/test_cache.py::test_what_reshard_did_not_write_is_never_removed_and_is_told",
    ],
    "A learned layout is checked, not trusted.": [
        "tests/formats/test_learned_layouts.py::test_one_changed_number_gives_no_other_bytes_and_no_traceback",
        "tests/formats/test_learned_layouts.py::test_a_layout_of_too_many_names_is_refused_at_once",
    ],
    "Text from files neither acts on the terminal nor begins a line of its own.": [
        "tests/hostile/test_hostile_checkpoints.py::test_control_characters_in_a_name_do_not_reach_the_terminal",
        "tests/cli/test_live_server.py::test_hostile_names_do_not_reach_the_terminal",
        "tests/cli/test_look_commands.py::test_what_a_file_says_cannot_begin_a_line_of_its_own",
    ],
    "Paths in a checkpoint's metadata cannot leave the checkpoint's directory.": [
        "tests/hostile/test_hostile_checkpoints.py::test_a_storage_path_that_leaves_the_directory",
        "tests/hostile/test_hostile_checkpoints.py::test_an_index_that_points_outside",
        "tests/docs/test_security.py::test_links_to_weights_are_followed_and_none_to_other_files_elsewhere",
        "tests/formats/test_beside_weights.py::test_links_that_leave_the_checkpoint_and_what_is_no_file_are_not_read",
    ],
    "A plan file is an order, not a map.": [
        "tests/parts/test_plan_files.py::test_forged_plan_files_are_refused_or_write_the_same_bytes",
    ],
    "`--resume` and `--finish` believe no journal": [
        "tests/engine/test_resume.py::test_a_forged_journal_gives_no_wrong_bytes_a_name",
    ],
    "`convert --ray` trusts the Ray cluster that you name": [],  # says what is not guarded
    "`make install`, `make release` and the image install no file of another digest": [
        "tests/packaging/check.py::exchanged_file_is_refused",
        "tests/packaging/check.py::provenance_is_true",
    ],
}
FSDP2, ZERO3 = FIXTURES / "dcp" / "fsdp2", FIXTURES / "deepspeed" / "z3-bf16"
on_linux = pytest.mark.skipif(not ON_LINUX, reason="limits of a process are set as on Linux")


def test_every_claim_has_its_tests():
    claimed = re.findall(r"^- \*\*(.+?)\*\*", (ROOT / "SECURITY.md").read_text(), re.MULTILINE | re.DOTALL)
    assert [" ".join(claim.split()) for claim in claimed] == list(CLAIMS)
    for path, name in (test.split("::") for tests in CLAIMS.values() for test in tests):
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


@on_linux
@pytest.mark.parametrize(
    "words",
    [
        "inspect SOURCE MODEL",
        "plan SOURCE --to vllm --tp 2 MODEL",
        "convert SOURCE TARGET --to vllm --tp 2 MODEL",
        "convert SOURCE TARGET --to megatron --optimizer MODEL",
        "doctor SOURCE --deep MODEL",
        "stats SOURCE MODEL",
        "fingerprint SOURCE MODEL",
        "verify SOURCE ORIGINAL",
        "roundtrip SOURCE --to dcp MODEL",
    ],
)
def test_a_command_touches_only_what_it_is_given(tmp_path: Path, words: str) -> None:
    """No socket, no program, nothing written but below the target's folder, seen by an audit hook of the interpreter."""
    outcome, text = watched(words, tmp_path)
    assert outcome == "done", text


@on_linux
def test_what_a_command_writes_elsewhere_is_seen(tmp_path: Path) -> None:
    """The check above can fail."""
    (tmp_path / "inside").mkdir()
    outcome, text = watched(f"inspect SOURCE MODEL --html {tmp_path / 'elsewhere.html'}", tmp_path / "inside")
    assert outcome == "WROTE ELSEWHERE", text


def watched(words: str, folder: Path) -> tuple[str, str]:
    """The outcome of a command on a copy of the FSDP2 fixture in `folder`."""
    shutil.copytree(FSDP2 / "checkpoint", folder / "source")
    meant = {"SOURCE": [folder / "source"], "TARGET": [folder / "target"], "ORIGINAL": [FSDP2 / "checkpoint"]}
    meant["MODEL"] = ["--model", FSDP2 / "model"]
    return outcome_of([str(each) for word in words.split() for each in meant.get(word, [word])], folder / "target")


@pytest.mark.parametrize("source", [FSDP2, ZERO3], ids=lambda path: path.name)
def test_a_conversion_imports_no_framework(tmp_path: Path, source: Path) -> None:
    """Neither the frameworks that wrote these pickles nor torch: none of their modules is loaded in the end."""
    script = """
import sys
from importlib import import_module
assert import_module("reshard.cli.main").run(sys.argv[1:]) == 0
frameworks = {"torch", "transformers", "deepspeed", "megatron", "accelerate", "vllm", "sglang", "peft", "nanotron"}
assert not frameworks & {name.partition(".")[0] for name in sys.modules}
"""
    model = ["--model", source / "model"] if (source / "model").is_dir() else []
    command = [sys.executable, "-c", script, "convert", source / "checkpoint", tmp_path / "out", "--to", "hf", *model]
    subprocess.run(command, check=True, capture_output=True)


def test_links_to_weights_are_followed_and_none_to_other_files_elsewhere(tmp_path: Path) -> None:
    """As SECURITY.md says. tests/formats/test_beside_weights.py has a cache of the hub, which consists of links."""
    from helpers.reshard_command import reshard

    model = FIXTURES / "hf" / "llama"
    (tmp_path / "snapshot").mkdir()
    for path in model.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "snapshot" / "tokenizer.json").symlink_to(tmp_path / "secret")
    assert reshard("convert", tmp_path / "snapshot", tmp_path / "out", "--to", "vllm").code == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert reshard("verify", model, tmp_path / "out").code == 0
