"""Sends another run id than it was given."""

from service_vm.program import __main__ as program


class Channel(program.Channel):
    def __init__(self, port, run, nonce):
        super().__init__(port, "00000000-0000-4000-8000-000000000000", nonce)


program.Channel = Channel
program.main()
