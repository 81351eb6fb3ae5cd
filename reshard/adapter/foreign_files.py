"""Files of programs whose checkpoints reshard does not read, and remains of downloads: what they are, and what to do instead.

They are looked for only where no format claims the files. A row is data: a glob in the language of signatures (registry.py), or the first
bytes of a file that was given by itself. Sources: the files that huggingface_hub 1.x, llama.cpp, orbax-checkpoint 0.12, TensorFlow 2, Keras
3, Flax, ONNX and TensorRT-LLM write.
"""

from __future__ import annotations

from collections.abc import Callable

from reshard.containers import magic_bytes
from reshard.containers.zip_directory import SAVE_STATE_DICT
from reshard.errors import CheckpointError, ReshardError, UnsupportedError
from reshard.geometry.value import value
from reshard.storage.files import Files


@value
class ForeignKind:
    """Files of one program."""

    word: str
    """What a user may write after `--to`."""
    name: str
    """The kind of file, with the program that writes it."""
    globs: tuple[str, ...]
    """Which files show it."""
    instead: str
    """What to use instead of such a checkpoint."""
    head: bytes = b""
    """The first bytes of such a file; empty if they are not known."""
    write: str = "Convert to hf, and use that program's own converter"
    """What to do to get such files."""


_TRANSFORMERS_4 = "Load it with transformers 4 and {}=True, save it with save_pretrained(), and give the folder that this writes"
_EXPORTED = "Give the checkpoint that was exported to it"

FOREIGN = (
    ForeignKind(
        "gguf",
        "a GGUF file (llama.cpp)",
        ("*.gguf",),
        "Give the folder with the safetensors files that it was made from",
        b"GGUF",
        "Convert to hf, and run llama.cpp's convert_hf_to_gguf.py on the result",
    ),
    ForeignKind(
        "orbax",
        "a part of an Orbax checkpoint (JAX)",
        (
            "_CHECKPOINT_METADATA", "*/_CHECKPOINT_METADATA", "manifest.ocdbt", "*/manifest.ocdbt", "_METADATA", "*/_METADATA",
        ),
        "Write a Hugging Face folder with the training framework's own converter (MaxText: checkpoint_conversion), and give that folder",
    ),
    ForeignKind(
        "tensorflow",
        "a file of TensorFlow",
        ("*.ckpt*.index", "*.data-*-of-*", "saved_model.pb", "*/saved_model.pb", "variables/variables.index", "tf_model*.h5"),
        _TRANSFORMERS_4.format("from_tf"),
    ),
    ForeignKind(
        "keras",
        "a file of Keras",
        ("*.keras", "*.h5", "*.hdf5"),
        "Load it with Keras, save its weights with torch.save() or as safetensors, and give that file",
        b"\x89HDF",
    ),
    ForeignKind("flax", "a file of Flax", ("*.msgpack",), _TRANSFORMERS_4.format("from_flax")),
    ForeignKind("pt2", "a program of torch.export", ("*.pt2",), f"{SAVE_STATE_DICT}, and give that file"),
    ForeignKind("onnx", "an ONNX file", ("*.onnx", "*.onnx_data", "onnx/*.onnx"), _EXPORTED),
    ForeignKind(
        "tensorrt",
        "a TensorRT engine",
        ("*.engine", "*.plan", "*.trt"),
        "An engine is built for one type of GPU, and its weights cannot be taken out. Give the checkpoint that it was built from",
        b"ftrt",
    ),
    # Without its first bytes: files of torch.save are zip archives, too.
    ForeignKind("zip", "a zip archive", ("*.zip",), "Unpack it, and give the folder", write="Convert to hf, and pack the folder"),
)  # fmt: skip
"""The first row that fits counts."""

_UNFINISHED = ("*.incomplete", "*.crdownload", "*.part", "*.partial", "*.aria2", "*.download")
# Where huggingface_hub keeps the files that it is downloading into a folder.
_DOWNLOADS = ".cache/huggingface/download/"
_AGAIN = "Run the download again, and wait until it ends"
# Of a file that its first bytes describe so, the content never arrived.
_BROKEN = ("an empty file", "zeros", "a Git LFS pointer", "a web page")
_HEAD = 262


def refusal(files: Files, fitting: Callable[[tuple[str, ...]], str | None]) -> ReshardError | None:
    """The error for files that no format claims: CheckpointError for the remains of a download, UnsupportedError for files of another
    program; None if nothing is known about them.

    fitting: globs -> the path of an entry of the folder, or of a folder in it, that fits one of them; None if none does.
    """
    running = (path for path in files.list(_DOWNLOADS) if path.endswith(_UNFINISHED[0].removeprefix("*")))
    if path := fitting(_UNFINISHED) or next(running, None):
        return CheckpointError(f"{path} is a download that has not ended", where=files.root, do=_AGAIN)
    head = _head(files, files.list()[0]) if files.is_file else None
    if head is not None and (described := magic_bytes.describe(head)).startswith(_BROKEN):
        return CheckpointError(f"the file is {described}", where=files.root, do="Get the file again")
    for kind in FOREIGN:
        path = fitting(kind.globs)
        if path or (head is not None and kind.head and head.startswith(kind.head)):
            what = "this file" if files.is_file else path
            return UnsupportedError(f"{what} is {kind.name}, which reshard does not read", where=files.root, do=kind.instead)
    return None


def target_refusal(word: str) -> UnsupportedError | None:
    """The error for the name of such files as a target; None if it is another name."""
    kind = next((kind for kind in FOREIGN if kind.word == word.lower()), None)
    return None if kind is None else UnsupportedError(f"`to={word}`: reshard does not write {kind.name}", do=kind.write)


def _head(files: Files, path: str) -> bytes:
    head = bytearray(min(_HEAD, files.size(path) or 0))
    if head:
        files.read_into(path, 0, memoryview(head))
    return bytes(head)
