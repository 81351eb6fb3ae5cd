"""Files of torch.save and .distcp files that a test has forged get the CRC-32 of what they hold now, so that reshard reads on."""

import io
import zipfile
import zlib


def zips(raw):
    """The zips in a file, one after the other: (where the zip starts, the zip)."""
    start, at = 0, 0
    while (end := raw.find(b"PK\5\6", at)) >= 0:
        at = end + 4
        try:
            archive = zipfile.ZipFile(io.BytesIO(raw[start : end + 22]))
        except zipfile.BadZipFile:  # these four bytes are a tensor's
            continue
        yield start, archive
        start = end + 22


def payload(raw, header):
    """Where the bytes of the member begin whose local header lies at `header`."""
    return header + 30 + _two(raw, header + 26) + _two(raw, header + 28)


def with_right_checksums(raw):
    """The bytes of a file, in which the directories of all its zips have the CRC-32 of each member."""
    made, entry = bytearray(raw), 0
    for start, archive in zips(raw):
        entry = start + archive.start_dir
        for each in archive.infolist():
            assert raw[entry : entry + 4] == b"PK\1\2" and each.compress_type == zipfile.ZIP_STORED
            first = payload(raw, start + each.header_offset)
            made[entry + 16 : entry + 20] = zlib.crc32(raw[first : first + each.file_size]).to_bytes(4, "little")
            entry += 46 + sum(_two(raw, entry + 28 + skipped) for skipped in (0, 2, 4))
    assert entry, "there is no zip"
    return bytes(made)


def _two(raw, at):
    return int.from_bytes(raw[at : at + 2], "little")
