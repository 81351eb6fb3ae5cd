"""The settings of libraries in which the number of bits is one of each module: read only where a config names the library."""
