"""Sends every line twice."""

from service_vm.program import __main__ as program


class Port(program.VirtioPort):
    def write(self, data):
        super().write(data + data)


program.VirtioPort = Port
program.main()
