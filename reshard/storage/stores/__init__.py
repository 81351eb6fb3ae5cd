"""Stores: files that are not on this machine. Read as `Files` (remote_files.py), written from front to back (file_fronts.py).

    URL -> urls.py -> Store (store.py: counts, repeats, checks) over a Backend (obstore_backend.py, fsspec_backend.py)

Nothing here is loaded for local paths.
"""
