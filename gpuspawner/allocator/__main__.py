"""``python -m gpuspawner.allocator``."""

from gpuspawner.allocator.app import main

main()
