"""Features made inside serving engines."""
