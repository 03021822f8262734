"""What starts an installation: the quickstart, libvirtd without systemd, units for production."""
