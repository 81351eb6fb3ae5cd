"""Geometry: arithmetic on small frozen values, in elements and bytes.

Nouns: DType (element type), Box (a hyper-rectangle of a tensor), Extent and Piece (the bytes of a box), Section and StoredTensor (canonical
boxes inside a stored array), Mosaic and Tile (an array composed of canonical boxes), Mesh and Distribution (training ranks), Parallel
(parallel sizes of a target).

This room opens no file and knows no model, no checkpoint format and no framework beyond the names of its element types.
"""
