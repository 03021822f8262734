"""Holds one empty virtual machine for as long as the host runs.

The first and the last machine of a host make the kernel patch its own code on every processor.
QEMU's emulation has been seen to hang in that, so here there is never a last one.
"""

import fcntl
import os
import signal

KVM_CREATE_VM = 0xAE01

machine = fcntl.ioctl(os.open("/dev/kvm", os.O_RDWR), KVM_CREATE_VM, 0)
signal.pause()
