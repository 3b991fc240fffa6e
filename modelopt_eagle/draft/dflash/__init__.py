"""DFlash: a block of tokens drafted at once, over the target's features injected as keys and values."""
