"""Builder of the virtual machine images: the Debian base, the initramfs and JupyterLab."""
