"""How a call reaches a kernel: checks, the ladder, lengths, launches, rankings."""
