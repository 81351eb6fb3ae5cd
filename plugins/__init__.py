"""The doors of other programs: each file is found by one of them through its entry-point group. Importing it imports none of them."""
