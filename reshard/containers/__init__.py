"""Containers: the bytes of one file as plain values, and back.

Files of safetensors (safetensors.py); files of torch.save, to read (torch_zip.py) and to write (torch_frame.py,
pickle_writer.py); the pickle inside them (inert_pickle.py) and the zip around it (zip_directory.py); distributed tensors in such files
(distributed_tensors.py); the .metadata file of torch.distributed.checkpoint (dcp_metadata.py), whose million objects are read in columns
(pickle_objects.py); files of ranks that are alike (recognised_files.py).

A container checks every size and offset that a file claims, and never runs code from a file. It knows no checkpoint format and no model.
"""
