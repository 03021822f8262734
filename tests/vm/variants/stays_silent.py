"""Boots, and says nothing."""

import time

from service_vm.program.__main__ import prepare

prepare()
while True:
    time.sleep(3600)
