"""What runs inside the tiny guest: standard library, and the service program's device ports.

``boot``    process 1: modules, seed, network, home disk, power button
``server``  HTTP: ``<prefix>api`` like JupyterLab's, and verbs for tests below ``<prefix>test/``
"""
