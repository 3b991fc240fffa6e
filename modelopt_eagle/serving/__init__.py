"""Checking a head in the engine that will serve it."""
