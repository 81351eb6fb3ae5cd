"""Files of torch.save and .distcp files that a test has forged get the CRC-32 of what they hold now, so that reshard reads on."""

import io
import zipfile
import zlib


def with_right_checksums(raw):
    """The bytes of a file, in which the directories of all its zips (one after the other) have the CRC-32 of each member."""
    made, start, at = bytearray(raw), 0, 0
    while (end := raw.find(b"PK\5\6", at)) >= 0:
        at = end + 4
        try:
            archive = zipfile.ZipFile(io.BytesIO(raw[start : end + 22]))
        except zipfile.BadZipFile:  # these four bytes are a tensor's
            continue
        entry = start + archive.start_dir
        for each in archive.infolist():
            assert raw[entry : entry + 4] == b"PK\1\2" and each.compress_type == zipfile.ZIP_STORED
            header = start + each.header_offset
            payload = header + 30 + sum(_two(raw, header + 26 + skipped) for skipped in (0, 2))
            made[entry + 16 : entry + 20] = zlib.crc32(raw[payload : payload + each.file_size]).to_bytes(4, "little")
            entry += 46 + sum(_two(raw, entry + 28 + skipped) for skipped in (0, 2, 4))
        start = end + 22
    assert start, "there is no zip"
    return bytes(made)


def _two(raw, at):
    return int.from_bytes(raw[at : at + 2], "little")
