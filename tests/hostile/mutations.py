"""Seeded mutations of a checkpoint: of bytes, of fields (JSON, YAML, safetensors headers), of pickle opcodes, of the folder.

A mutation is a function of a folder, which it changes, and of a random generator; it returns what it did in a few words, or None if the
folder has nothing of its kind. The same generator makes the same change, so a recipe (fixture, kind, seed) is a reproducer.
"""

from __future__ import annotations

import io
import json
import os
import pickletools
import random
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

Mutation = Callable[[Path, random.Random], str | None]

NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    255,
    1 << 16,
    10**9,
    (1 << 31) - 1,
    1 << 32,
    (1 << 61) - 1,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    10**30,
    -(1 << 63),
]
VALUES: list[Any] = [
    *NUMBERS, None, True, False, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "0", "../x", "/etc/hostname", "a\0b", "\x1b[2J",
    "x" * 5000, "\ud800", "é", [], {}, [[]], [None], {"a": 1}, {"": {}}, list(range(50)), [0] * 5,
]  # fmt: skip


def mutate_bytes(folder: Path, chance: random.Random) -> str | None:
    path = _any_file(folder, chance)
    if path is None:
        return None
    raw = bytearray(path.read_bytes())
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
        # Headers and directories lie at the ends of files, and are the interesting part.
        length = max(len(raw), 1)
        at = min(
            length - 1,
            chance.choice(
                (chance.randrange(length), chance.randrange(min(length, 4000)), -1 - chance.randrange(min(length, 2000)) + length)
            ),
        )
        count = chance.choice((1, 1, 2, 4, 8, 64, 1000))
        how = chance.choice(("set", "flip", "cut", "insert", "remove", "zero", "double", "number"))
        if how == "set":
            raw[at : at + 1] = bytes([chance.randrange(256)])
        elif how == "flip":
            raw[at : at + 1] = bytes([(raw[at] if at < len(raw) else 0) ^ 1 << chance.randrange(8)])
        elif how == "cut":
            del raw[at:]
        elif how == "insert":
            raw[at:at] = chance.randbytes(count)
        elif how == "remove":
            del raw[at : at + count]
        elif how == "zero":
            raw[at : at + count] = bytes(len(raw[at : at + count]))
        elif how == "double":
            raw[at:at] = raw[at : at + count]
        else:
            width = chance.choice((1, 2, 4, 8))
            number = chance.choice(NUMBERS) & ((1 << 8 * width) - 1)
            raw[at : at + width] = number.to_bytes(width, chance.choice(("little", "little", "big")))
        done.append(f"{how} at {at}")
    path.write_bytes(raw)
    return f"{path.name}: {', '.join(done)}"


def mutate_json(folder: Path, chance: random.Random) -> str | None:
    found = [path for path in _files(folder) if path.suffix == ".json" or path.name in (".zarray", ".zattrs", ".zgroup")]
    if not found:
        return None
    path = chance.choice(found)
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return None
    done, document = _mutated(document, chance)
    path.write_bytes(_json(document))
    return f"{path.name}: {done}"


def mutate_safetensors(folder: Path, chance: random.Random) -> str | None:
    found = [path for path in _files(folder) if path.suffix == ".safetensors" and path.stat().st_size > 8]
    if not found:
        return None
    path = chance.choice(found)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    try:
        header = json.loads(raw[8 : 8 + length])
    except ValueError:
        return None
    done, header = _mutated(header, chance)
    text = _json(header)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return f"{path.name}: {done}"


def mutate_text(folder: Path, chance: random.Random) -> str | None:
    """YAML, `latest` and the like: words replaced, lines removed or repeated."""
    names = ("latest", "latest_checkpointed_iteration.txt", "progress.txt")
    found = [path for path in _files(folder) if path.suffix in (".yaml", ".yml", ".txt", ".index", ".meta") or path.name in names]
    if not found:
        return None
    path = chance.choice(found)
    lines = path.read_text(errors="surrogateescape").split("\n")
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(lines))
        how = chance.choice(("value", "value", "value", "remove", "repeat", "indent", "tag"))
        key, colon, _ = lines[at].partition(":")
        word = chance.choice(
            (*map(repr, VALUES), "9" * 5000, "*a", "&a [*a]", "!!python/object/apply:os.getpid []", "{", "- -", "0x_", "1:2", "2001-01-40")
        )
        if how == "value":
            lines[at] = f"{key}: {word}" if colon else word
        elif how == "remove":
            del lines[at]
            lines = lines or [""]
        elif how == "repeat":
            lines[at:at] = [lines[at]] * chance.choice((1, 50))
        elif how == "indent":
            lines[at] = " " * chance.choice((1, 2, 4000)) + lines[at]
        else:
            lines[at] = f"{key}{colon} !!python/name:os.system {word}"
    path.write_text("\n".join(lines), errors="surrogateescape")
    return f"{path.name}: text"


def mutate_pickle(folder: Path, chance: random.Random) -> str | None:
    found = [path for path in _files(folder) if _has_pickle(path)]
    if not found:
        return None
    path = chance.choice(found)
    raw = path.read_bytes()
    if raw[:2] != b"PK":
        code, done = _mutated_pickle(raw, chance)
        path.write_bytes(code)
        return f"{path.name}: {done}"
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = [(member, archive.read(member)) for member in archive.infolist()]
    out = io.BytesIO()
    done = "nothing"
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for member, content in members:
            if member.filename.endswith("data.pkl"):
                content, done = _mutated_pickle(content, chance)
            member.extra = b""
            archive.writestr(member, content, zipfile.ZIP_STORED)
    path.write_bytes(out.getvalue())
    return f"{path.name}: {done}"


def mutate_folder(folder: Path, chance: random.Random) -> str | None:
    found = _files(folder)
    if not found:
        return None
    path, other = chance.choice(found), chance.choice(found)
    how = chance.choice(
        (
            "remove",
            "swap",
            "copy",
            "rename",
            "link",
            "loop",
            "outside",
            "fifo",
            "socket",
            "device",
            "empty",
            "folder",
            "alone",
            "move up",
            "stray",
        )
    )
    if how == "remove":
        path.unlink()
    elif how == "swap":
        path.rename(folder / "between")
        if other != path:
            other.rename(path)
        (folder / "between").rename(other)
    elif how == "copy":
        content = path.read_bytes()
        other.write_bytes(content)
    elif how == "rename":
        digits = "".join(str((int(char) + chance.choice((1, 7))) % 10) if char.isdigit() else char for char in path.name)
        path.rename(
            path.with_name(chance.choice((digits, path.name + ".bak", path.name.upper(), "\udcff" + path.name, "x\n\x1b[2J" + path.suffix)))
        )
    elif how == "stray":
        digits = "".join(chance.choice("0123456789") if char.isdigit() and chance.random() < 0.5 else char for char in path.name)
        target = path.with_name(digits)
        if not target.exists():
            shutil.copy(path, target)
    elif how == "move up":
        path.rename(path.parent.parent / path.name) if path.parent != folder else path.unlink()
    elif how == "alone":
        for each in found:
            if each != path:
                each.unlink()
    else:
        path.unlink()
        if how == "link" and other.exists():
            path.symlink_to(other)
        elif how == "loop":
            path.symlink_to(path.name)
        elif how == "outside":
            path.symlink_to(chance.choice(("/etc/hostname", "/etc", "/nowhere", "x" * 255)))
        elif how == "fifo":
            os.mkfifo(path)
        elif how == "socket" and len(str(path)) < 100:
            socket.socket(socket.AF_UNIX).bind(str(path))
        elif how == "device":
            path.symlink_to(chance.choice(("/dev/zero", "/dev/null", "/dev/random", "/dev/tty", "/proc/self/mem")))
        elif how == "empty":
            path.touch()
        else:
            path.mkdir()
    return f"{how} {path.name} ({other.name})"


def mutate_limits(folder: Path, chance: random.Random) -> str | None:
    """A setting or a tensor's name beyond every limit: nested, of many digits, long, of many parts, of several lines."""
    name = chance.choice((".".join("a" * 5000), ".".join("7" * 300), "x" * 100_000, "a\nreshard: forged [defect]\x1b[2J", "\u202e\x85\r"))
    tensors = [path for path in _files(folder) if path.suffix == ".safetensors" and path.stat().st_size > 8]
    documents = [path for path in _files(folder) if path.suffix == ".json"]
    if tensors and (not documents or chance.random() < 0.5):
        path = chance.choice(tensors)
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        old = chance.choice([*header])
        text = _json({name if key == old else key: value for key, value in header.items()})
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + struct.unpack("<Q", raw[:8])[0] :])
        return f"{path.name}: {old[:80]} is renamed"
    if not documents:
        return None
    path = chance.choice(documents)
    document = json.loads(path.read_bytes())
    place = chance.choice(list(_places(document)) or [("x",)])
    owner = document if isinstance(document, dict | list) else {}
    for key in place[:-1]:
        owner = owner[key]
    depth, digits = chance.choice((99, 150, 300, 900, 5000)), chance.choice((30, 99, 150, 400, 4000, 5000))
    value = chance.choice(
        ("[" * depth + "]" * depth, '{"a":' * depth + "0" + "}" * depth, "9" * digits, f"-1{'0' * digits}", "1e999", json.dumps(name))
    )
    owner[place[-1]] = "@"
    path.write_bytes(_json(document).replace(b'"@"', value.encode("utf-8", "surrogatepass"), 1))
    return f"{path.name}: {'.'.join(map(str, place))[:80]} is {value[:10]}..., {len(value)} characters"


KINDS: dict[str, Mutation] = {
    "bytes": mutate_bytes,
    "json": mutate_json,
    "safetensors": mutate_safetensors,
    "text": mutate_text,
    "pickle": mutate_pickle,
    "folder": mutate_folder,
    "limits": mutate_limits,
}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _any_file(folder: Path, chance: random.Random) -> Path | None:
    found = [path for path in _files(folder) if path.stat().st_size]
    return chance.choice(found) if found else None


def _json(document: object) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _mutated(document: Any, chance: random.Random) -> tuple[str, Any]:
    """A JSON document with one to three changes."""
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places or chance.random() < 0.02:
            document = deepcopy(chance.choice(VALUES))
            done.append("all")
            continue
        place = chance.choice(places)
        owner = document
        for key in place[:-1]:
            owner = owner[key]
        last, how = place[-1], chance.choice(("value", "value", "value", "near", "remove", "rename", "swap", "wrap"))
        old = owner[last]
        if how == "near" and type(old) is int:
            owner[last] = old + chance.choice((-1, 1, 2, -old, old, -2 * old))
        elif how == "remove":
            del owner[last]
        elif how == "rename" and isinstance(owner, dict):
            owner[chance.choice(("", "../x", f"{last}x", str(last).replace("0", "1"), "x" * 3000, "a\0", "\x1b[2J", "__metadata__"))] = (
                owner.pop(last)
            )
        elif how == "swap":
            other = chance.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
            owner[last], owner[other] = owner[other], old
        elif how == "wrap":
            owner[last] = chance.choice(([old], {"a": old}, str(old)))
        else:
            owner[last] = deepcopy(chance.choice(VALUES))
        done.append(f"{how} {'.'.join(map(str, place))[:80]}")
    return ", ".join(done), document


def _has_pickle(path: Path) -> bool:
    if path.suffix in (".json", ".safetensors", ".txt", ".yaml", ".distcp"):
        return False
    with open(path, "rb") as file:
        head = file.read(4)
    return head[:1] == b"\x80" or (head == b"PK\x03\x04" and zipfile.is_zipfile(path))


SNIPPETS = [
    *(bytes([code]) for code in b"N}])(0121RbsueaQt" + b"\x85\x86\x87\x88\x81\x8f\x90\x91\x94"),
    *(b"K\x00", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"G\x7f\xf0" + bytes(6), b"X\x01\x00\x00\x00a"),
    *(b"cos\nsystem\n", b"c__builtin__\neval\n", b"ctorch\nSize\n", b"ctorch\nbfloat16\n", b"ctorch\nquint8\n"),
    *(b"(t", b"(l", b"(d", b"h\x00", b"q\x00", b"ccollections\nOrderedDict\n)R"),
]


def _mutated_pickle(code: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A pickle with one to three of its opcodes removed, repeated, exchanged or given another argument."""
    done = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        try:
            ops = [(op.name, arg, at) for op, arg, at in pickletools.genops(code)]
        except Exception:
            break
        starts = [at for _, _, at in ops] + [ops[-1][2] + 1]
        rest = code[starts[-1] :]
        parts = [code[start:stop] for start, stop in pairwise(starts)]
        i = chance.randrange(1, max(2, len(parts) - 1))
        i = min(i, len(parts) - 1)
        how = chance.choice(
            ("remove", "repeat", "swap", "insert", "replace", "argument", "argument", "argument", "argument", "argument", "range")
        )
        if how == "remove":
            del parts[i]
        elif how == "repeat":
            parts[i:i] = [parts[i]] * chance.choice((1, 2, 100))
        elif how == "swap":
            j = chance.randrange(1, len(parts))
            parts[i], parts[j] = parts[j], parts[i]
        elif how == "insert":
            parts.insert(i, chance.choice(SNIPPETS))
        elif how == "replace":
            parts[i] = chance.choice(SNIPPETS)
        elif how == "range":
            j = chance.randrange(1, len(parts))
            parts[i:i] = parts[j : j + chance.choice((2, 5, 20))]
        else:
            with_argument = [k for k, (_, arg, _) in enumerate(ops) if arg is not None and k]
            if not with_argument:
                continue
            i = chance.choice(with_argument)
            parts[i] = _other_argument(ops[i][0], ops[i][1], parts[i], chance)
        done.append(f"{how} {ops[min(i, len(ops) - 1)][0]} at {starts[min(i, len(ops))]}")
        code = b"".join(parts) + rest
    return code, ", ".join(done)


def _other_argument(opcode: str, argument: Any, part: bytes, chance: random.Random) -> bytes:
    if opcode in ("BININT", "BININT1", "BININT2", "LONG1"):
        number = chance.choice((*NUMBERS, argument + 1, argument - 1, argument * 2))
        raw = number.to_bytes(17, "little", signed=True)
        return b"\x8a\x11" + raw
    if opcode in ("BINUNICODE", "SHORT_BINUNICODE"):
        text = chance.choice(
            (
                "",
                "0",
                "../x",
                "a" * 4000,
                argument + "x",
                argument[:-1],
                argument.replace("0", "1"),
                argument.upper(),
                "a\0b",
                "weight",
                "cpu",
            )
        )
        raw = text.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(raw)) + raw
    if opcode == "GLOBAL":
        names = ("os system", "torch float32", "torch FloatStorage", "torch Size", "builtins set", "builtins list", "a B")
        names += ("collections OrderedDict", "torch._utils _rebuild_tensor_v2")
        return b"c" + chance.choice(names).replace(" ", "\n").encode() + b"\n"
    if opcode in ("BINGET", "LONG_BINGET"):
        return b"j" + struct.pack("<I", max(0, min(1 << 31, argument + chance.choice((-5, -2, -1, 1, 2, 5)))))
    return part[:-1] + bytes([chance.randrange(256)])
