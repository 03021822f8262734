"""Cuts every line in the middle."""

from service_vm.program import __main__ as program


class Port(program.VirtioPort):
    def write(self, data):
        super().write(data[: len(data) // 2] + b"\n")


program.VirtioPort = Port
program.main()
