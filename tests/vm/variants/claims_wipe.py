"""Says that it wiped, and did not."""

from service_vm.program.__main__ import main
from service_vm.program.checks import wipe
from service_vm.program.ports import PAGE


def nothing(memory, *rest):
    return memory.size - PAGE


wipe.overwrite = nothing
wipe.read_back = nothing
main()
