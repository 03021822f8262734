"""Switches off before the last line."""

from service_vm.program import __main__ as program
from service_vm.program.kernel import power_off


class Port(program.VirtioPort):
    def write(self, data):
        if b'"t": "final"' in data:
            power_off()
        super().write(data)


program.VirtioPort = Port
program.main()
