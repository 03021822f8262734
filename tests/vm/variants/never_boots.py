"""Process 1 ends at once, and the kernel panics."""

raise SystemExit(1)
