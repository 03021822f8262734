"""One GPU host: what it has, and the guests, disks and devices on it."""
