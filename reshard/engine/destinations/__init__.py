"""Destinations: what a conversion writes, and what each kind keeps so that an interrupted conversion is resumed."""
