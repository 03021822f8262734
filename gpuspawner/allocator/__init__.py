"""The service that owns the truth: its API, and the loops that move leases and GPUs on."""
