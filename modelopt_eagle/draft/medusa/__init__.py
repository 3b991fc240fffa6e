"""Medusa: heads over the target's last state, one for each drafted token, none of which reads another's."""
