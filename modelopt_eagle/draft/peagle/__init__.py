"""P-EAGLE: an EAGLE-3 head that drafts all of its tokens in one pass."""
