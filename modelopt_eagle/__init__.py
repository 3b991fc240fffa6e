"""EAGLE-3 draft heads: train, validate, export and serve them. See ``docs/design.md``."""

__version__ = "0.1.0"
