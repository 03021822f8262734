"""Sends another nonce than it was given."""

from service_vm.program import __main__ as program


class Channel(program.Channel):
    def __init__(self, port, run, nonce):
        super().__init__(port, run, nonce[::-1] if nonce[::-1] != nonce else "0" * 32)


program.Channel = Channel
program.main()
