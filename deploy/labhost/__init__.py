"""The passthrough lab of ``deploy/lab``: a virtual machine that plays a GPU host.

``image`` builds its disk, ``machine`` says what hardware it has, ``network`` and ``seed`` connect
it to this machine, ``running`` starts and stops it, ``main`` is the command.
"""
