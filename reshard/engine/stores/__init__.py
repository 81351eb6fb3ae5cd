"""Stores: reading ahead from them, and writing files to them from front to back (the schedule *gather*)."""
