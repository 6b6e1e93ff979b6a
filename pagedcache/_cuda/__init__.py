"""The GPU side: a library of kernels behind ctypes, and PyCUDA for contexts and memory.

Nothing here runs, and neither PyCUDA nor a driver is looked for, before a device is asked for.
``library`` loads the kernels, ``libcuda`` the driver; ``driver`` makes one ``Device`` per GPU;
``memory`` takes and gives back what lies on it; ``streams`` and ``order`` say what waits for what;
``arrays`` and ``exchange`` are the doors to other libraries.
"""
