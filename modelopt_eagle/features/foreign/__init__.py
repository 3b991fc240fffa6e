"""Dumps of other tools, read as they are."""
