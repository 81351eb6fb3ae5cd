"""No option tells what was secret in its value: every option of every command that takes a text is tried, without any store or server."""

from __future__ import annotations

import re
from importlib import import_module

import click
import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard

from reshard.secrets import masked, masked_arguments, public, remember

MAIN = import_module("reshard.cli.main")
MARK = "M4RKEDsecret"
# What a text may look like that holds a secret, and that reshard cannot mistake for something else.
FORMS = (
    f"https://user:{MARK}@127.0.0.1:9/x",
    f"http://127.0.0.1:9/x?X-Amz-Signature={MARK}&X-Amz-Credential={MARK}",
    f"s3a://{MARK}@127.0.0.1/x#{MARK}",
    f"secret_access_key={MARK}",
    f"curl -H 'Authorization: Bearer {MARK}' http://127.0.0.1:9",
)


def text_options():
    """(command, option) for every option that takes a text, and (command, None) for its arguments."""
    context = click.Context(MAIN.cli)
    for name in MAIN.COMMANDS:
        command = MAIN.cli.get_command(context, name)
        for param in command.params:
            is_plain = isinstance(param.type, click.types.StringParamType | click.ParamType) and not isinstance(
                param.type, click.Choice | click.types.IntRange | click.types.FloatRange | click.types.BoolParamType
            )
            if isinstance(param, click.Option) and not param.is_flag and is_plain:
                yield name, max(param.opts, key=len)
        yield name, None


OPTIONS = sorted({*text_options()}, key=str)
EVERY_FORM = (None, "--storage-option", "--model", "--push", "--then", "--into")


def words_of(command, option, value):
    """A command line in which the option has the value; what the command needs besides is there."""
    arguments = {"convert": 2, "delta": 3, "apply": 3, "plan": 1, "verify": 2, "diff": 2, "explain": 2, "cat": 1, "export": 1, "push": 2}
    count = arguments.get(
        command, 1 if command not in ("formats", "versions", "env", "architectures", "completion", "clean", "cache") else 0
    )
    given = [str(HF / "llama")] * min(count, 2) + ["out"] * (count - 2)
    if command == "convert":
        given = [str(HF / "llama"), "out"]
    if command == "push":
        given = [str(HF / "llama"), "http://127.0.0.1:9"]
    if command == "cache":
        given = ["list"]
    if option is None:
        return [command, *([value] * max(count, 1))]
    more = [] if option == "--to" or command not in ("convert", "plan", "apply", "roundtrip", "digests", "watch") else ["--to", "hf"]
    if command == "hub" and option != "--port":
        more += ["--port", "0"]
    if command == "watch" and option != "--into":
        more += ["--into", "out/{step}", "--all"]
    return [command, *given, *more, option, value]


def held(folder):
    """What lies in the files there. Their names are those that the option gives."""
    return "".join(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("command", sorted({command for command, _ in OPTIONS}))
def test_no_option_lets_a_secret_out(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("reshard.storage.stores.store._ATTEMPTS", 1)
    monkeypatch.setattr("reshard.doors.hub.Hub.serve", lambda hub: None)
    for place, option in enumerate(option for name, option in OPTIONS if name == command):
        forms = FORMS if option in EVERY_FORM else (FORMS[place % len(FORMS)],)
        for number, form in enumerate(forms):
            words = words_of(command, option, form)
            done = reshard("--debug", *words, "-v", *(["--log-file", f"log{number}.txt"] if option != "--log-file" else []))
            text = f"{done.out}{done.err}{held(tmp_path)}"
            assert MARK not in text, (words, re.search(f".{{0,200}}{MARK}.{{0,80}}", text)[0])


def test_every_command_has_an_option_that_takes_a_text():
    """The test above tries something: all commands, and the options that carry credentials."""
    assert {command for command, _ in OPTIONS} == {*MAIN.COMMANDS}
    assert {("convert", "--storage-option"), ("convert", "--model"), ("watch", "--then"), ("watch", "--push"), ("cache", "--cache")} <= {
        *OPTIONS
    }
    assert len(OPTIONS) > 150


@pytest.mark.distinct
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:p@ss@host:80/m?X-Amz-Signature=abc&b=c", "https://***@host:80/m?X-Amz-Signature=***&b=***"),
        ("https://user:pa/ss@host/m", "https://***@host/m"),
        ("see s3://key@bucket/m: gone", "see s3://***@bucket/m: gone"),
        ("(https://host/m?abc).", "(https://host/m?***)."),
        ('{"url": "https://host/m?a=b"}', '{"url": "https://host/m?a=***"}'),
        ("https://host/m#access_token=abc", "https://host/m#access_token=***"),
        ("x-amz-security-token: abc", "x-amz-security-token: ***"),
        ("{'Authorization': 'Basic abc', 'Accept': '*'}", "{'Authorization': 'Basic ***', 'Accept': '*'}"),
        ("`storage_option=` aws_secret_access_key=abc, region=us", "`storage_option=` aws_secret_access_key=***, region=us"),
    ],
)
def test_a_text_is_masked(text, shown):
    assert masked(text) == shown and masked(shown) == shown


@pytest.mark.distinct
@pytest.mark.parametrize(
    "text",
    [
        "hf://org/name@main",
        "s3://bucket/run@step-3",
        "runs/7@1000",
        "http://localhost:8000/x@5",
        "Did you mean s3://bucket/run?",
        "abfss://container@account.dfs.core.windows.net/run",
        "model.tokens=5, num_tokens=7, bos_token_id=1",
        "a token: 5 bytes",
        "a public bucket needs `storage_option=` skip_signature=true",
        "https://host, a@b",
    ],
)
def test_what_is_no_secret_stays(text):
    assert masked(text) == text == public(text)


def test_arguments_keep_the_names_and_what_is_harmless():
    pairs = ["secret_access_key=abcdef", "endpoint=http://minio:9000", "region=eu", "aws_endpoint_url=http://me:abcdef@minio", "abcdef"]
    line = [
        "convert",
        "a",
        *(word for pair in pairs for word in ("--storage-option", pair)),
        "--storage-option=sas_token=abcdef",
        "--tp",
        "2",
    ]
    shown = ["secret_access_key=***", "endpoint=http://minio:9000", "region=eu", "aws_endpoint_url=http://***@minio", "***"]
    assert masked_arguments(line) == [
        "convert",
        "a",
        *(word for pair in shown for word in ("--storage-option", pair)),
        "--storage-option=sas_token=***",
        "--tp",
        "2",
    ]


def test_a_value_that_was_given_is_masked_wherever_it_stands(monkeypatch):
    remember("value-given-before", 'with"quote\\here')
    monkeypatch.setenv("MY_SERVICE_TOKEN", "value-of-the-environment")
    remember()  # the environment is looked at again
    assert masked('x value-given-before "with\\"quote\\\\here" value-of-the-environment') == 'x *** "***" ***'


@pytest.mark.parametrize(
    "text",
    ["a://" * 20_000, "a:" * 200_000 + "@", "https://x?a=" + "." * 200_000, "a=b " * 50_000, "authorization:" * 50_000, "a:/" * 50_000],
)
def test_a_long_hostile_text_takes_no_time(text):
    import time

    began = time.process_time()
    masked(text)
    assert time.process_time() - began < 3
