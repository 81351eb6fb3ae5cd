"""Plan files: a proven plan on the disk, so that many machines plan once.

    write.py      a plan -> columns
    columns.py    named columns <-> one compact, digested file
    read.py       columns -> a plan that can be run; nothing in the file is trusted

A plan file holds where the bytes come from and where they go, the framing and the small files of the target, and what is recorded beside
the result. It holds no weight, and the source's directory is not taken from it: the user names the source, and its files must have the
lengths and stamps of the file.
"""
