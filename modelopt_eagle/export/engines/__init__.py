"""What each serving engine reads, and from which release on."""
