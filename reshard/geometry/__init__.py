"""Arithmetic on small values: element types, boxes, strides, meshes, parallel sizes. No file, no model."""
