"""EAGLE-3: the recurrent drafter over fused features."""
