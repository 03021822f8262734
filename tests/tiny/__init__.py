"""The tiny guest: a VM that looks like a JupyterLab VM from outside and is up in seconds."""
