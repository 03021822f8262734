"""Sends one line of 1 MiB after ``hello``."""

from service_vm.program import __main__ as program


class Port(program.VirtioPort):
    def write(self, data):
        super().write(data)
        if b'"t": "hello"' in data:
            super().write(b'{"v": 1, "t": "progress", "check": "' + b"x" * (1 << 20) + b'"}\n')


program.VirtioPort = Port
program.main()
