"""Sends a line that is no UTF-8 after ``hello``."""

from service_vm.program import __main__ as program


class Port(program.VirtioPort):
    def write(self, data):
        super().write(data)
        if b'"t": "hello"' in data:
            super().write(b"\xff\xfe\xc3\x28\n")


program.VirtioPort = Port
program.main()
