"""Storage: the only room that opens the files of a checkpoint.

Nouns: Files (a read-only tree of files: list, size, read ranges), LocalFiles, TarFiles and VirtualFiles (its implementations),
DecodedRanges (compressed ranges, readable at any offset), Staging (files that are being written under temporary names).

This room knows bytes and paths. It must not know what the bytes mean.
"""
