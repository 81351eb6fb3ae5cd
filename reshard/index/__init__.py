"""Which box of which tensor lies in which bytes of which file."""
